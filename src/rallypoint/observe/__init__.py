"""What a process shows of itself: traces, wait reports, recordings of its machines."""
