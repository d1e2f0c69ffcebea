"""The user's code: the copies that a run keeps, and how a worker runs them."""
