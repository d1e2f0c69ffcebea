"""``rallypoint chaos``: a run under faults, compared with an undisturbed one."""
