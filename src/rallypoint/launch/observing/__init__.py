"""What a launcher shows of its run beside the console: the page, and where each process's metrics are."""
