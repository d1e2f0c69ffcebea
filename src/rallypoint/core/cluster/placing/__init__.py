"""Where the coordinator places shards anew, while the members stay."""
