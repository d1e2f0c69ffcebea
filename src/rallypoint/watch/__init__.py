"""What people look at: a page for a run, from what its coordinator has announced. It changes nothing in a run."""
