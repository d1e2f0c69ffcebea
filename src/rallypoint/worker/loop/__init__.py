"""The user's side of a worker: the session, the run, micro-batches, the worker's own optimizer."""
