"""What moves in a simulated job in place of tensors: names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Content = Any  # an int; in a streaming job the frozenset of the contributions that made it
GARBAGE: Content = -1


@dataclass(frozen=True)
class State:
    """Under AllReduce a shard's whole state, as a worker has brought it."""

    content: Content


@dataclass(frozen=True)
class Mean:
    """Under AllReduce the mean of a step's contributions; None: the step changes nothing."""

    content: Content


def combine(*parts: int) -> int:
    """A name for what these make together (hashes of tuples of ints are the same in every process)."""
    return hash(parts) & 0x7FFF_FFFF_FFFF_FFFF


def tree(contents: list[int]) -> int:
    """What the sum of all replicas' contributions is: see core/sums.py, which this does not use."""
    if len(contents) == 1:
        return contents[0]
    middle = 1 << (len(contents) - 1).bit_length() - 1
    return combine(tree(contents[:middle]), tree(contents[middle:]))
