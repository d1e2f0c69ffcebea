"""What a job decides from the results of its evaluations."""
