"""The blocks of one shard's step that an aggregator holds: which of them merge, and which may be sent upstream.

Example: R = 8, and workers with the replicas 0..3 use this aggregator. Replicas 2, 0, 3, 1 arrive: [2,4) is merged when
3 is there, [0,2) and then [0,4) when 1 is there, and [0,4) is sent. If the worker with replicas 0 and 1 goes to the
servers itself, nothing more can be added to [2,4): it is sent as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rallypoint.core.aggregator.effects import BlockContribution, DropPayload, Effect, Forget, Keep, MergeParts
from rallypoint.core.sums import Block, blocks_of, is_block, parent, sibling


@dataclass(slots=True)
class HeldPart:
    """A block that is held. `sent`: the connection on which it was sent upstream; None before."""

    block: Block
    weight: float  # total, float64, added by the tree (I3)
    losses: tuple[int, ...]
    gradients: tuple[int, ...]
    sent: tuple[str, int] | None = None

    @property
    def factor(self) -> float:
        """What its values are multiplied by when it is merged: the weight of a leaf. (A server does it, else.)"""
        return self.weight if self.block.size == 1 else 1.0


@dataclass(slots=True)
class BlockSum:
    """The parts of the sum over `replicas` replicas. A part that was sent stays, and is not merged any more.

    `lowest` is the first of the replicas: 0, or the one that carries this state and is the only one.
    """

    shard: int
    step: int
    replicas: int
    lowest: int = 0
    _parts: dict[int, HeldPart] = field(default_factory=dict)  # by first replica; they are disjoint

    def __iter__(self) -> Iterator[HeldPart]:
        return iter([self._parts[at] for at in sorted(self._parts)])

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, new: BlockContribution) -> list[Effect]:
        """Take a contribution that has arrived; merge what can be merged."""
        block = new.block
        if not self._has(block):
            return [
                DropPayload(
                    new.ticket, f"replicas {block.start} to {block.stop - 1} are no block of shard {self.shard}"
                )
            ]
        held = {replica for part in self._parts.values() for replica in range(*part.block)}
        if held.issuperset(range(*block)):
            return [DropPayload(new.ticket)]  # a repeat (I2)
        effects: list[Effect] = []
        for old in [part for part in self if block.covers(part.block)]:
            effects.append(self._forget(old))
        self._parts[block.start] = part = HeldPart(block, new.weight, new.losses, new.gradients)
        effects.append(Keep(self.shard, self.step, block.start, new.ticket))
        while (other := self._unsent(sibling(part.block, self.replicas))) is not None and other is not part:
            left, right = (part, other) if part.block.start < other.block.start else (other, part)
            effects.append(
                MergeParts(self.shard, self.step, left.block.start, right.block.start, left.factor, right.factor)
            )
            part = self._merged(left, right)
        return effects

    def ready(self, coming: frozenset[int]) -> list[HeldPart]:
        """The parts to send now: nothing of what is `coming` (replicas) can be added to them before."""
        waiting = [part for part in self if part.sent is None]
        if not waiting:
            return []
        sent = {replica for part in self._parts.values() if part.sent for replica in range(*part.block)}
        able = coming | {replica for part in waiting for replica in range(*part.block)}
        planned = set(blocks_of(able - sent, self.replicas))
        return [part for part in waiting if part.block in planned]

    def forget_all(self) -> list[Effect]:
        """Drop every part."""
        return [self._forget(part) for part in self]

    def validate(self) -> None:
        """Raise AssertionError unless the parts are disjoint blocks, and unsent ones have no unsent sibling."""
        end = 0
        for part in self:
            assert self._has(part.block), f"{part.block} is no block of {self.replicas}"
            assert part.block.start >= end, f"the parts of shard {self.shard}, step {self.step} overlap"
            end = part.block.stop
            other = self._unsent(sibling(part.block, self.replicas))
            assert part.sent or other is None or other is part, f"{part.block} and {other} are not merged"

    def _has(self, block: Block) -> bool:
        return is_block(Block(block.start - self.lowest, block.stop - self.lowest), self.replicas)

    def _unsent(self, block: Block) -> HeldPart | None:
        part = self._parts.get(block.start)
        return part if part is not None and part.block == block and part.sent is None else None

    def _merged(self, left: HeldPart, right: HeldPart) -> HeldPart:
        del self._parts[right.block.start]
        whole = HeldPart(
            parent(left.block, self.replicas), left.weight + right.weight, left.losses + right.losses,
            left.gradients + right.gradients,
        )  # fmt: skip
        self._parts[left.block.start] = whole
        return whole

    def _forget(self, part: HeldPart) -> Forget:
        del self._parts[part.block.start]
        return Forget(self.shard, self.step, part.block.start)
