"""Control messages that record what was computed."""
