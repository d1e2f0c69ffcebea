"""Replays: a step of a run is computed again, looked at, and compared with what the run has recorded."""
