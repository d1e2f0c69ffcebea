"""What the console of a run shows, by noun: members, contributions, the sums of a script's own loop."""
