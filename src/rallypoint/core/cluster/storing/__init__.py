"""When snapshots are taken, what of them is stored, and the last one of a job that fails."""
