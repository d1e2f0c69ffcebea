"""The numbers that a worker computes with: autocast, parameters held in bf16, losses that are read late."""
