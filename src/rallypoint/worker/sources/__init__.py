"""What a mode does on the worker: how contributions are made."""
