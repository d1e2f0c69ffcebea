"""What commands do that are more than one call."""
