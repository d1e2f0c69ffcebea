"""A loop that stays the script's own: `rp.wrap`."""
