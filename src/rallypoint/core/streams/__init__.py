"""Streams: which items of which part a replica reads at a step."""
