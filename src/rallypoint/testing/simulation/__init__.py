"""The whole cluster in one process on a manual clock: every role's real machine, and faults by a seeded plan."""
