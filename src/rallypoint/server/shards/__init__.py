"""What a server keeps of a shard: parameters, means, or rows of a table. One protocol, three implementations."""
