"""Names in place of values."""

from __future__ import annotations


def combine(*parts: int) -> int:
    """A name for what these make together (hashes of tuples of ints are the same in every process)."""
    return hash(parts) & 0x7FFF_FFFF_FFFF_FFFF


def tree(contents: list[int]) -> int:
    """What the sum of all replicas' contributions is: see core/sums/tree.py, which this does not use."""
    if len(contents) == 1:
        return contents[0]
    middle = 1 << (len(contents) - 1).bit_length() - 1
    return combine(tree(contents[:middle]), tree(contents[middle:]))
