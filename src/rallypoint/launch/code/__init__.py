"""The user's code: copies of it that a run keeps, and how a worker runs them."""
