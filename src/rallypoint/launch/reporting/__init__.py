"""Reports of a run: what somebody else needs to understand a stall or a crash, without secrets."""
