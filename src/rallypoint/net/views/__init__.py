"""How views come to members: whole, or as the difference to the one before."""
