"""Trackers: a run's figures for TensorBoard and its like, written from the run's log beside the run."""
