"""Where others are, and where this process can be reached: no settings, no connections."""
