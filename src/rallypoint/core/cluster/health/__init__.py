"""What the coordinator makes of silence, of broken connections and of members that cannot go on."""
