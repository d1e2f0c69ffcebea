"""Gradients leave during backward: a hook per parameter fills slots, and a shard goes as soon as it is whole."""

from __future__ import annotations

import torch

from rallypoint.errors import ModelError
from rallypoint.worker.exchange import Exchange
from rallypoint.worker.staging import Staging
from rallypoint.worker.tensors import ModelTensors, Placed


class GradientHooks:
    """Post-accumulate-grad hooks on every trained parameter of a model.

    Per replica: `begin_micro` before each backward, `end_replica` after the last. A parameter that got no gradient by
    then contributes zeros, so nothing ever waits for it.
    """

    def __init__(self, tensors: ModelTensors, exchange: Exchange, staging: Staging) -> None:
        self._tensors, self._exchange, self._staging = tensors, exchange, staging
        layout = exchange.layout
        self._shards_of = [
            layout.shards_touching(p.entry.start, p.entry.stop) if p.tensor.numel() else [] for p in tensors.parameters
        ]
        counts = [0] * len(layout.shards)
        for shards in self._shards_of:
            for shard in shards:
                counts[shard] += 1
        self._parameters_in = counts
        self._last = False
        self._reset()
        self._handles = [
            placed.tensor.register_post_accumulate_grad_hook(self._hook(index, placed))  # type: ignore[no-untyped-call]
            for index, placed in enumerate(tensors.parameters)
        ]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def begin_micro(self, *, last: bool) -> None:
        """A backward begins; with `last`, shards leave as they become whole."""
        self._last = last

    def end_replica(self) -> None:
        """The last backward is over: send what is still here, and the buffers if this is replica 0."""
        for index, placed in enumerate(self._tensors.parameters):
            if index not in self._done:
                self._finish_unused(index, placed)
        if self._exchange.next_replica == 0:
            self._send_buffers()
        self._reset()
        self._staging.drain()
        self._exchange.replica_computed()

    def _reset(self) -> None:
        self._left = list(self._parameters_in)
        self._claimed: set[int] = set()
        self._touched: set[int] = set()
        self._done: set[int] = set()

    def _hook(self, index: int, placed: Placed) -> object:
        def hook(parameter: torch.Tensor) -> None:
            if self._last or self._staging.eager:
                self._write(index, placed, parameter)
            if self._last:
                self._release(index)

        return hook

    def _write(self, index: int, placed: Placed, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise ModelError(f"parameter {placed.entry.spec.name} has a sparse gradient: use sparse=False")
        if index in self._done:
            raise ModelError(
                f"parameter {placed.entry.spec.name} got a gradient twice in one backward (reentrant checkpointing?): "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self._claim(index)
        self._staging.write(placed.of(self._exchange.buffer), gradient, add=index in self._touched)
        self._touched.add(index)
        parameter.grad = None  # in its slot now: the memory is free for the rest of the backward

    def _claim(self, index: int) -> None:
        for shard in self._shards_of[index]:
            if shard not in self._claimed:
                self._exchange.claim(shard)
                self._claimed.add(shard)

    def _release(self, index: int) -> None:
        self._done.add(index)
        for shard in self._shards_of[index]:
            self._left[shard] -= 1
            if self._left[shard] == 0:
                self._staging.then(lambda shard=shard: self._exchange.filled(shard))  # type: ignore[misc]

    def _finish_unused(self, index: int, placed: Placed) -> None:
        if placed.tensor.grad is not None:
            self._write(index, placed, placed.tensor)
        elif index not in self._touched:
            self._claim(index)
            placed.of(self._exchange.buffer).zero_()
        self._release(index)

    def _send_buffers(self) -> None:
        for placed in self._tensors.buffers:
            for shard in self._exchange.layout.shards_touching(placed.entry.start, placed.entry.stop):
                if shard not in self._claimed:
                    self._exchange.claim(shard).zero_()
                    self._claimed.add(shard)
            placed.of(self._exchange.buffer).copy_(placed.tensor)
        for place in self._exchange.layout.shards:
            if place.role == "buffers":
                self._exchange.filled(place.index)
