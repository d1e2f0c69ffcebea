"""Audits: which contributions a second worker computes too, who that is, and whose opinion counts (`audit=`)."""
