"""``rallypoint doctor``: is this machine, is this cluster fit for a job? Facts, what they mean, what to do."""
