"""What a worker has sent of a step, and what it adds up before it sends it: one push for a block of replicas (I3).

Example: R = 8, and this worker has replicas 3, 4, 5, cut into the blocks [3,4) and [4,6). Replica 3 is sent as it is.
Replica 4 is kept beside the slot. Replica 5 is added to it, and the block [4,6) is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rallypoint.core.sums.tree import Block, Forest, blocks_of, halves, leaf, parent, sibling


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
