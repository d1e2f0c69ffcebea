"""What an operator may order, as the coordinator's machine does it."""
