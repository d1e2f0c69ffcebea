"""Where shards, replicas and their copies go: what the next view says of them (pure)."""
