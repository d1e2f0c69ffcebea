"""Audits: what was computed is computed once more elsewhere, and compared byte for byte."""
