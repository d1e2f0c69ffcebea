"""The reduction server: owns shards, sums contributions, applies the optimizer, publishes versions."""
