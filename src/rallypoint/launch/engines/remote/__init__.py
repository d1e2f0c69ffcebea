"""Processes on machines that another program leads to, such as ``ssh``."""
