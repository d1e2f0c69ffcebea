"""The record of a run for replays: digests of contributions and of versions."""
