"""The worker's side: the user's loop, the gradient hooks, the links to the servers. A worker's loss loses nothing."""
