"""What workers say of evaluations."""
