"""The worker's pure machines: aligned and streaming jobs, slots, codec states."""
