"""Processes on the machines of a Slurm job."""
