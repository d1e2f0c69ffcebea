"""Roles from the environment of somebody else's launcher: torchrun, mpirun."""
