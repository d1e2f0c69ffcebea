"""A worker's part in the caches that the hosts of a job share."""
