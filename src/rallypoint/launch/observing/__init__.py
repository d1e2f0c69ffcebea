"""What is seen of a run beside its console: its page, metrics, reports; and what is computed again of its steps."""
