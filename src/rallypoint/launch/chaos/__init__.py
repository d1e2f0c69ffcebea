"""``rallypoint chaos``: a run under faults, compared with one in peace."""
