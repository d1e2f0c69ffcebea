"""The thread that owns a server's shards: it takes events and runs effects on tensors."""
