"""What a process shows of itself: spans, and waits that say their name."""
