"""Processes on machines that ``ssh`` reaches."""
