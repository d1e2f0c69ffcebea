"""The server's pure state machines: one shard, all shards of a server, the clip decision, codec states in transit."""
