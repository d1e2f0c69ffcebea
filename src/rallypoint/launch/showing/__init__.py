"""What the console of a run is made of."""
