"""The coordinator's pure machine and its parts: members, views, assignments, snapshots."""
