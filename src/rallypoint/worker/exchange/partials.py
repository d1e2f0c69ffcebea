"""The memory of a worker that adds up its replicas before it sends them (core/sums.py decides what)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from rallypoint.core.sums import Part


@dataclass(frozen=True, slots=True)
class Sum:
    """The total weight of a block, and its replicas with a loss, or a gradient, that is not finite."""

    weight: float
    losses: frozenset[int]  # the replicas whose loss is not finite
    gradients: frozenset[int]  # the replicas whose loss is finite, and whose gradient is not


class Partials:
    """Weighted sums of blocks, by shard and first replica. Only the thread that fills slots calls it, but for `sum`."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, Sum]] = {}  # fp32, 1-D
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._sums: dict[int, Sum] = {}

    @torch.no_grad()
    def add_up(self, shard: int, part: Part, slot: torch.Tensor, leaf: Sum) -> None:
        """Weigh the slot, which holds one replica's contribution, and add to it, or keep it, as `part` says.

        `leaf` is what is known of that replica. Each addition is a node of the tree (I3): one rounding, of two
        neighbouring blocks.
        """
        if leaf.weight != 1.0:
            slot.mul_(leaf.weight)
        found = leaf
        for at in part.merges:
            values, kept = self._kept.pop((shard, at))
            slot.add_(values)
            found = Sum(kept.weight + found.weight, kept.losses | found.losses, kept.gradients | found.gradients)
            self._free[shard].append(values)
        if part.keep:
            self._keep((shard, part.block.start), (self._room(shard, slot).copy_(slot), found))
        else:
            self._sums[shard] = found

    def sum(self, shard: int) -> Sum:
        """What is known of the block that is in the shard's slot now."""
        return self._sums.pop(shard)

    def clear(self) -> None:
        """Another step begins: what is kept is not needed. The memory is used again."""
        for (shard, _), (values, _) in self._kept.items():
            self._free[shard].append(values)
        self._kept.clear()
        self._sums.clear()

    def _keep(self, key: tuple[int, int], kept: tuple[torch.Tensor, Sum]) -> None:
        if key in self._kept:
            self._free[key[0]].append(self._kept[key][0])
        self._kept[key] = kept

    def _room(self, shard: int, slot: torch.Tensor) -> torch.Tensor:
        free = self._free[shard]
        return free.pop() if free else torch.empty_like(slot, device="cpu", pin_memory=False)
