"""The thread that owns a server's shards: events in, effects on tensors out."""
