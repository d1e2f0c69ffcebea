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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import xxhash

from rallypoint.core.layout import Layout


class Block(NamedTuple):
    """The replicas `start`..`stop` - 1: a node of the tree."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def covers(self, other: Block) -> bool:
        """True if every replica of `other` is in this block."""
        return self.start <= other.start and other.stop <= self.stop


def leaf(replica: int) -> Block:
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
        self.count = 0  # the replicas in the held blocks
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
        return self.covers(leaf(replica))

    def add(self, block: Block) -> list[Block]:
        """Hold one more block. Returns the held blocks that it supersedes (it has their replicas), ascending.

        It must not be covered.
        """
        superseded = sorted([held for held in self._held.values() if block.covers(held)])
        for held in superseded:
            del self._held[held.start]
            self.count -= held.size
        self._held[block.start] = block
        self.count += block.stop - block.start
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
            if (held := self._held.pop(start, None)) is not None:
                self.count -= held.size

    def keep_only(self, wanted: Callable[[Block], bool]) -> None:
        """Hold only the blocks for which `wanted` is true."""
        self.remove([block.start for block in self if not wanted(block)])

    def clear(self) -> None:
        self._held.clear()
        self.count = 0

    def validate(self) -> None:
        """Raise AssertionError unless the held blocks are disjoint nodes without siblings."""
        held = sorted(self._held.values())
        assert self.count == sum(block.size for block in held), f"{self.count} replicas are counted in {held}"
        assert all(is_block(block, self.replicas) for block in held), f"{held} are not blocks of {self.replicas}"
        assert all(a.stop <= b.start for a, b in pairwise(held)), f"{held} overlap"
        assert not any(sibling(b, self.replicas) in self and b.size < self.replicas for b in held), f"{held}: siblings"


def _width(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


# What a worker has sent of a step, and what it adds up before it sends it: one push for a block of replicas (I3).
#
# Example: R = 8, and this worker has replicas 3, 4, 5, cut into the blocks [3,4) and [4,6). Replica 3 is sent as it is.
# Replica 4 is kept beside the slot. Replica 5 is added to it, and the block [4,6) is sent.


@dataclass(frozen=True, slots=True)
class Part:
    """What to do with a slot that holds a replica's contribution, before the machine hears that it is full.

    Attributes:
        merges: the kept blocks to add to the slot, in this order, each by its first replica.
        block: what the slot then holds.
        keep: copy the slot, to add it to its sibling later; else it is sent.
    """

    merges: tuple[int, ...]
    block: Block
    keep: bool


@dataclass(slots=True)
class Presum:
    """The contributions of one worker to one step.

    Attributes:
        shards: the shards for which replicas are added up.
        replicas: how many replicas contribute to them.
        largest: the most replicas to add up, a power of two. It needs log2 of that many copies of the shards.
    """

    shards: frozenset[int] = frozenset()
    replicas: int = 1
    largest: int = 1
    _sent: dict[int, set[int]] = field(default_factory=dict)  # by shard: the replicas that its primary was sent
    _kept: dict[int, Forest] = field(default_factory=dict)  # by shard: the blocks beside the slot
    _own: frozenset[int] = frozenset()
    _blocks: dict[frozenset[int], dict[int, Block]] = field(default_factory=dict)  # what `_planned` has computed

    def plan(self, own: Iterable[int]) -> None:
        """Set the replicas that this worker has. Any others that it computes (backup tasks) are sent one by one."""
        own = frozenset(own)
        if own != self._own:
            self._own = own
            self._blocks.clear()
            for shard in self._kept:
                self._prune(shard)

    def has(self, shard: int, replica: int) -> bool:
        """True if this replica's contribution to the shard was sent, or is kept here."""
        sent = shard in self._sent and replica in self._sent[shard]
        return sent or (shard in self._kept and self._kept[shard].has(replica))

    def part(self, shard: int, replica: int) -> Part | None:
        """What to do with the slot, which holds this replica's contribution; None: send it as it is. Changes nothing.

        Do it, then call `filled`.
        """
        if shard not in self.shards or (planned := self._planned(shard, replica)).size == 1:
            return None
        forest, block, merges = self._kept.get(shard, Forest(self.replicas)), leaf(replica), list[int]()
        while block != planned and (other := sibling(block, self.replicas)) in forest:
            merges.append(other.start)
            block = parent(block, self.replicas)
        return Part(tuple(merges), block, block != planned)

    def filled(self, shard: int, part: Part, *, use: bool, send: bool) -> Block | None:
        """What `part` says has been done. Returns the block to send; None: it is kept, or dropped.

        It is dropped with `use=False`, if it cannot be sent now (`send=False`), and if it was to be kept but the
        replicas have been reassigned meanwhile. Then it may have to be computed again.
        """
        if part.merges and shard in self._kept:
            self._kept[shard].remove(part.merges)
        if use and part.keep and self._planned(shard, part.block.start).size > part.block.size:
            self._kept.setdefault(shard, Forest(self.replicas)).add(part.block)
        if not (use and send) or part.keep:
            return None
        self._sent.setdefault(shard, set()).update(range(*part.block))
        self._prune(shard)
        return part.block

    def lost(self, shard: int) -> None:
        """The shard's primary may not have what it was sent."""
        self._sent.pop(shard, None)

    def forget(self, replicas: Iterable[int]) -> None:
        """These replicas' contributions, which were sent one by one, are to be sent again."""
        for sent in self._sent.values():
            sent.difference_update(replicas)

    def clear(self) -> None:
        """Another step begins, or a generation."""
        self._sent.clear()
        self._kept.clear()

    @property
    def sent(self) -> set[int]:
        """The shards whose primary was sent something of this step."""
        return {shard for shard, replicas in self._sent.items() if replicas}

    def validate(self) -> None:
        """Raise AssertionError if a block is kept that will never be sent."""
        for shard, forest in self._kept.items():
            for block in forest:
                planned = self._planned(shard, block.start)
                assert planned.covers(block), f"{block} of shard {shard} is kept, and {planned} is to be sent"
                assert planned != block, f"{block} of shard {shard} is kept, though it is whole"

    def _prune(self, shard: int) -> None:
        """Drop what is kept of a block that is not to be sent any more."""
        if shard in self._kept:
            self._kept[shard].keep_only(lambda kept: self._planned(shard, kept.start).size > kept.size)

    def _planned(self, shard: int, replica: int) -> Block:
        """The block in which this replica is sent."""
        left = self._own.difference(self._sent.get(shard, ()))
        if left not in self._blocks:
            blocks = [small for block in blocks_of(left, self.replicas) for small in self._cut(block)]
            self._blocks[left] = {replica: block for block in blocks for replica in range(*block)}
        return self._blocks[left].get(replica, leaf(replica))

    def _cut(self, block: Block) -> list[Block]:
        return [block] if block.size <= self.largest else [b for half in halves(block) for b in self._cut(half)]


# Digests of contributions: what one replica adds to one shard at one step, in 16 bytes.
#
# A contribution is a pure function of its name (I11). So whoever computes it again, on any worker, gets the same
# digest: audits compare them between workers, `rallypoint replay` with those that the run has recorded.
#
# What is digested is the replica's leaf in the tree of the sum (I3): weight x gradient, each product rounded to fp32,
# before anything is added to it and before a codec writes it. With fp16 the gradient is that of the scaled loss.


DIGEST_BYTES = 16


def leaf_digest(leaf: bytes | bytearray | memoryview) -> bytes:
    """Return the digest (XXH3-128, 16 bytes) of a leaf: the fp32 words of one shard, little-endian, one after another.

    It finds accidents, not forgers: anybody can make another leaf of the same digest.

    Raises ValueError if these are not whole words.
    """
    nbytes = leaf.nbytes if isinstance(leaf, memoryview) else len(leaf)
    if nbytes % 4:
        raise ValueError(f"a leaf of {nbytes} bytes: it has fp32 words of 4 bytes each")
    return xxhash.xxh3_128_digest(leaf)


def dense_shards(layout: Layout) -> list[int]:
    """The shards whose contributions are digested, in order: those of parameters, without buffers and tables."""
    return [shard.index for shard in layout.shards if shard.role == "parameters"]


class Piece(NamedTuple):
    """A tensor's words in one shard: [start, stop), counted from the shard's first word."""

    name: str
    start: int
    stop: int


def pieces_of(layout: Layout) -> list[list[Piece]]:
    """By shard: the pieces of tensors that it holds, in order. A part of a table is one piece."""
    found: list[list[Piece]] = [[] for _ in layout.shards]
    for entry in layout.entries:
        for index in layout.shards_touching(entry.start, entry.stop) if entry.start < entry.stop else ():
            shard = layout.shards[index]
            start, stop = max(entry.start, shard.start), min(entry.stop, shard.stop)
            found[index].append(Piece(entry.spec.name, start - shard.start, stop - shard.start))
    for shard in layout.shards:
        if shard.part is not None:
            found[shard.index].append(Piece(layout.tables[shard.part.table].name, 0, shard.words))
    return found


# Which scripts have ended in a job of sums, and which sums can therefore never be made.


@dataclass(slots=True)
class EndedScripts:
    """The ranks whose scripts have ended, each with how many sums it has asked for.

    All scripts ask for the same sums in the same order. So a sum that comes after an ended script's last one would be
    waited for without an end (I8).
    """

    _by_rank: dict[int, tuple[int, str]] = field(default_factory=dict)  # rank -> sums, the worker's name

    def told(self, rank: int, sums: int, worker: str) -> None:
        """The script of that rank has ended after so many sums."""
        self._by_rank[rank] = sums, worker

    def refusal_of(self, sums: int) -> str:
        """Why sum number `sums` (the first one is 1) can never be made, as a sentence; "" if it can."""
        ended = [(rank, made, worker) for rank, (made, worker) in self._by_rank.items() if made < sums]
        if not ended:
            return ""
        rank, made, worker = min(ended, key=lambda one: (one[1], one[0]))
        return (
            f"rank {rank} ({worker}) has ended its script after {made:,} sums, and sum {made + 1:,} needs all ranks: "
            "let all of them make the same number of steps (as many batches on each), or let a script that ends early "
            "raise an error"
        )
