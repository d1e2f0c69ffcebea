"""A key-value store (`job.store`) in the simulation: the real exchange of a worker, on simulated links."""
