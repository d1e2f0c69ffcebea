"""What an operator may order, as a server's machine does it."""
