"""Figures of each process for Prometheus: what is measured, from what exists anyway, read when somebody asks."""
