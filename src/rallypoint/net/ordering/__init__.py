"""What an operator orders of a running job."""
