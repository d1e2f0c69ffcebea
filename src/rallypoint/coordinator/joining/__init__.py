"""Who comes to the coordinator: newcomers, members that come back, and what proves who they are."""
