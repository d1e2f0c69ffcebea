"""Checkpoints that other libraries write and read: torch.distributed.checkpoint, safetensors, torch.save."""
