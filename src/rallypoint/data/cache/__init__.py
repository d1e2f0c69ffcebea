"""Pieces of a store's files that this machine, and the job's other machines, have already."""
