"""Evaluations as the coordinator decides about them: which versions are due, who evaluates them, their results."""
