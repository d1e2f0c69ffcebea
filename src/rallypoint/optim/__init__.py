"""Server-side optimizers: torch.optim's own, on flat shards."""
