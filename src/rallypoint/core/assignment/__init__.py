"""Assigns replicas to workers: evenly, or by measured speed (pure)."""
