"""A worker that is a group of ranks: the leader's side, and that of the other ranks."""
