"""The worker's side of each mode: how it makes contributions."""
