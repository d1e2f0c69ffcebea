"""The copies of a shard: what its primary knows of them, and how they prove what they hold (pure)."""
