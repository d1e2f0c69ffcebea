"""What a worker records of the replicas that it computes: digests of their contributions."""
