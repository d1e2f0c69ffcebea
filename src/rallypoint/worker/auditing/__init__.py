"""Audits, on the worker's side."""
