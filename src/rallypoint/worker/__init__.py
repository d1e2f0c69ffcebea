"""The worker's side: the user's loop, gradient hooks, links to the servers. Owns nothing that cannot be lost."""
