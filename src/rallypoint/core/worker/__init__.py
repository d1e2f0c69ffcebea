"""The worker's pure machines: aligned and streaming jobs, slots, hand-over of codec states."""
