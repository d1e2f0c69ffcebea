"""Evaluations on a worker: the script's functions, when they run here, and what the coordinator is told."""
