"""The coordinator: decides which members a job has, and publishes views. It is not on the path of a step (I7)."""
