"""A worker's side of a key-value store (`job.store`)."""
