"""From samples to batches. `core/order.py` decides which samples."""
