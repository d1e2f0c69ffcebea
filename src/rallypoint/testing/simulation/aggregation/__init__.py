"""What the simulation plays of aggregators."""
