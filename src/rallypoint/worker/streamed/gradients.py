"""Gradients of streamed parameters: each shard's memory is there while its gradient is written and sent."""

from __future__ import annotations

import torch

from rallypoint.worker.sources.hooks import GradientHooks
from rallypoint.worker.tensors import Placed


class StreamedGradients(GradientHooks):
    """Like `GradientHooks`; it never reads a parameter."""

    def _finish_unused(self, index: int, placed: Placed) -> None:
        if placed.tensor.grad is None and index not in self._touched:
            for shard in self._shards_of[index]:
                if self._claim(shard):
                    self._zero(shard, placed)
            self._release(index)
        else:
            super()._finish_unused(index, placed)

    @torch.no_grad()
    def _zero(self, shard: int, placed: Placed) -> None:
        vector, first = self._exchange.memory.part(shard)
        place = self._exchange.layout.shards[shard]
        start, stop = max(placed.entry.start, place.start), min(placed.entry.stop, place.stop)
        vector[start - first : stop - first].zero_()
