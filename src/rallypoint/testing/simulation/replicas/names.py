"""Names in place of values."""

from __future__ import annotations


def combine(*parts: int) -> int:
    """A name for what these make together (hashes of tuples of ints are the same in every process)."""
    return hash(parts) & 0x7FFF_FFFF_FFFF_FFFF
