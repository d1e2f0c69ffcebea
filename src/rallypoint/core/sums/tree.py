"""The tree of a sum over replicas (I3): blocks of replicas, and which of them merge.

The sum of R contributions has a fixed shape: a binary tree over replica numbers. Its leaves are the replicas. Its nodes
are *blocks*: aligned ranges [a, a + 2^k), cut off at R. A node is left + right, with one fp32 rounding. Whoever holds
both halves of a block may add them, and gets the same floats.

Example, R = 5:

    [0,5) = [0,4) + [4,5)      [0,4) = [0,2) + [2,4)      [0,2) = [0,1) + [1,2)      [2,4) = [2,3) + [3,4)

[4,6) and [4,8) are cut off at 5: they are the leaf [4,5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple


class Block(NamedTuple):
    """The replicas `start`..`stop` - 1: a node of the tree."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of replicas."""
        return self.stop - self.start

    def covers(self, other: Block) -> bool:
        """True if every replica of `other` is in this block."""
        return self.start <= other.start and other.stop <= self.stop


def leaf(replica: int) -> Block:
    """The block of one replica."""
    return Block(replica, replica + 1)


def is_block(block: Block, replicas: int) -> bool:
    """True if `block` is a node of the tree over `replicas` replicas."""
    start, stop = block
    if not 0 <= start < stop <= replicas:
        return False
    width = _width(stop - start)
    return start % width == 0 and stop == min(start + width, replicas)


def halves(block: Block) -> tuple[Block, Block]:
    """The left and right half of a block of two or more replicas. The right one may be smaller."""
    middle = block.start + _width(block.size) // 2
    return Block(block.start, middle), Block(middle, block.stop)


def parent(block: Block, replicas: int) -> Block:
    """The node that `block` is a half of. The root, [0, `replicas`), is its own parent."""
    width = _width(block.size)
    while block.size < replicas:
        width *= 2
        start = block.start - block.start % width
        above = Block(start, min(start + width, replicas))
        if above != block:
            return above
    return block


def sibling(block: Block, replicas: int) -> Block:
    """The other half of the block's parent; for the root, the root itself."""
    above = parent(block, replicas)
    if above == block:
        return block
    left, right = halves(above)
    return right if block == left else left


def blocks_of(run: Iterable[int], replicas: int) -> list[Block]:
    """Cut a set of replicas into as few blocks as there can be, ascending.

    Examples with 8 replicas: 0..3 is one block; 3, 4, 5 are [3,4) and [4,6). A run of h neighbours needs at most
    2 log2(h) blocks, for h of 3 or more.
    """
    left = set(run)
    blocks: list[Block] = []
    for replica in sorted(left):
        if replica not in left:
            continue
        block = leaf(replica)
        while (above := parent(block, replicas)) != block and above.start == replica and left.issuperset(range(*above)):
            block = above
        left.difference_update(range(*block))
        blocks.append(block)
    return blocks


class Forest:
    """The blocks that somebody holds of one sum: disjoint nodes of the tree over `replicas` replicas."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._held: dict[int, Block] = {}  # by start
        self._root = Block(0, replicas)

    def __iter__(self) -> Iterator[Block]:
        return iter(sorted(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: Block) -> bool:
        return self._held.get(block.start) == block

    @property
    def whole(self) -> bool:
        """True if the sum is complete: the root is held."""
        return self._held.get(0) == self._root

    def covers(self, block: Block) -> bool:
        """True if a held block has every replica of `block`."""
        start, stop = block
        return True in [first <= start and stop <= last for first, last in self._held.values()]

    def has(self, replica: int) -> bool:
        """True if a held block has this replica."""
        return self.covers(leaf(replica))

    @property
    def count(self) -> int:
        """The number of replicas in the held blocks."""
        count = 0
        for start, stop in self._held.values():
            count += stop - start
        return count

    def add(self, block: Block) -> list[Block]:
        """Hold one more block. Returns the held blocks that it supersedes (it has their replicas), ascending.

        It must not be covered.
        """
        superseded = sorted([held for held in self._held.values() if block.covers(held)])
        for held in superseded:
            del self._held[held.start]
        self._held[block.start] = block
        return superseded

    def merge(self, block: Block) -> tuple[Block, Block] | None:
        """Merge the held `block` with its sibling, if that is held: their parent is held instead.

        Returns (left, right), the two halves that became one; None if there is nothing to merge.
        """
        if block == self._root:
            return None
        other = sibling(block, self.replicas)
        if other == block or other not in self:
            return None
        left, right = sorted((block, other))
        del self._held[right.start]
        self._held[left.start] = Block(left.start, right.stop)
        return left, right

    @property
    def prefix(self) -> int:
        """The lowest replica that no held block has; `replicas` if there is none."""
        stop = 0
        while (block := self._held.get(stop)) is not None:
            stop = block.stop
        return stop

    def remove(self, starts: Iterable[int]) -> None:
        """Hold these blocks, named by their first replica, no more."""
        for start in starts:
            self._held.pop(start, None)

    def keep_only(self, wanted: Callable[[Block], bool]) -> None:
        """Hold only the blocks for which `wanted` is true."""
        self._held = {start: block for start, block in self._held.items() if wanted(block)}

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()

    def validate(self) -> None:
        """Raise AssertionError unless the held blocks are disjoint nodes without siblings."""
        held = sorted(self._held.values())
        assert all(is_block(block, self.replicas) for block in held), f"{held} are not blocks of {self.replicas}"
        assert all(a.stop <= b.start for a, b in pairwise(held)), f"{held} overlap"
        assert not any(sibling(b, self.replicas) in self and b.size < self.replicas for b in held), f"{held}: siblings"


def _width(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
