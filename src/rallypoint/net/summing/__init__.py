"""Messages of a job of sums."""
