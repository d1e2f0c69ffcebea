"""The end of a job before its last step, as its script wants it."""
