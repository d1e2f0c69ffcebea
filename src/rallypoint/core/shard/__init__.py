"""The server's pure machines: one shard, all shards of a server, clipping, codec states on their way."""
