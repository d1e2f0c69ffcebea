"""What the coordinator does about an operator's orders."""
