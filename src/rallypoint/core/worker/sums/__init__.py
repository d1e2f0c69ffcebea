"""The worker's machine of a job of sums."""
