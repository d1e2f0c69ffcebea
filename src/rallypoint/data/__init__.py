"""From samples to batches. Which samples is `core/order.py`'s decision."""
