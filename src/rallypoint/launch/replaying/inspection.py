"""Looks at the replicas of a step while they are computed: samples, gradients, the first module that is not finite."""

from __future__ import annotations

import math
import pdb
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rallypoint.core.layout import Layout
from rallypoint.data.loader import MicroBatches
from rallypoint.launch.replaying.task import Layer, Looked, NotFinite
from rallypoint.worker.exchange.replica import Contributions
from rallypoint.worker.loop.micro import Micro


class KeptGradients(Contributions):
    """Records as a run does, and keeps the gradients of the replicas of one step."""

    def __init__(self, layout: Layout, every: int, step: int) -> None:
        super().__init__(layout, every)
        self._layout, self._step, self._keeps = layout, step, False
        self._vector = torch.zeros(0, dtype=torch.float32, device="cpu")
        self.vector, self.loss = self._vector, math.nan  # of the replica that was computed last

    def begin(self, step: int, replica: int) -> None:
        """A replica begins."""
        super().begin(step, replica)
        self._keeps = step == self._step
        if self._keeps:
            self._vector = torch.zeros(self._layout.words, dtype=torch.float32, device="cpu")

    def filled(self, shard: int, gradient: torch.Tensor, weight: float) -> None:
        """Keep the gradient, without its weight."""
        super().filled(shard, gradient, weight)
        place = self._layout.shards[shard]
        if self._keeps and place.role == "parameters":
            self._vector[place.start : place.stop].copy_(gradient)

    def take(self, loss: float) -> bytes:
        """The replica is computed."""
        if self._keeps:
            self.vector, self.loss = self._vector, loss
        return super().take(loss)


class Inspection:
    """Looks at the replicas of a step, one after the other: `begin` for each micro-batch, `end` when it is computed."""

    def __init__(self, model: torch.nn.Module, layout: Layout, batches: MicroBatches, kept: KeptGradients) -> None:
        self._model, self._layout, self._batches, self._kept = model, layout, batches, kept
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        self._order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._replica, self._samples = -1, list[int]()
        self._first: NotFinite | None = None
        self.looked: list[Looked] = []

    def begin(self, micro: Micro, *, debug: bool) -> None:
        """A micro-batch of the replica begins. `debug`: open the debugger in the model's forward pass."""
        if micro.replica != self._replica:
            self._replica, self._samples, self._first = micro.replica, [], None
            self._handles = [module.register_forward_hook(self._passed) for module in self._names]
        self._samples += self._batches.indices(micro.step, micro.replica, micro.index)
        if debug and micro.index == 0:
            _debug_forward(self._model)

    def end(self) -> None:
        """The replica in progress, if there is one, is computed."""
        if self._replica < 0:
            return
        for handle in self._handles:
            handle.remove()
        vector = self._kept.vector
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        self.looked.append(Looked(
            self._replica, tuple(self._samples), repr(self._kept.loss), repr(norm), tuple(self._layers(vector)),
            self._first,
        ))  # fmt: skip
        self._replica = -1

    def _layers(self, vector: torch.Tensor) -> Iterator[Layer]:
        for entry in sorted(self._layout.entries, key=lambda entry: self._order.get(entry.spec.name, -1)):
            if entry.spec.group >= 0 and entry.stop > entry.start:
                values = vector[entry.start : entry.start + entry.spec.numel]
                bad = int(torch.isfinite(values).logical_not_().sum())
                finite = values if not bad else values[torch.isfinite(values)]
                norm = float(torch.linalg.vector_norm(finite, dtype=torch.float64))
                least, most = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
                yield Layer(entry.spec.name, norm, least, most, bad)

    def _passed(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._first is None and not _is_finite(output):
            own = module.parameters(recurse=False)
            self._first = NotFinite(self._names[module], type(module).__name__, _is_finite(inputs), _is_finite(own))


def _is_finite(values: Any) -> bool:
    """True if all floating-point numbers in these tensors, also nested, are finite."""
    if isinstance(values, torch.Tensor):
        return not values.is_floating_point() or bool(torch.isfinite(values).all())
    if isinstance(values, dict):
        return all(_is_finite(value) for value in values.values())
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        return all(_is_finite(value) for value in values)
    return True


def _debug_forward(model: torch.nn.Module) -> None:
    """Let the model's next forward pass run in the debugger, which stops at its first line."""
    forward = model.forward

    def debugged(*args: Any, **kwargs: Any) -> Any:
        del model.__dict__["forward"]  # the one of its class is behind it
        print("the debugger stops in the forward pass: s, n and c step and go on, p shows values", file=sys.stderr)
        return pdb.Pdb(nosigint=True).runcall(forward, *args, **kwargs)

    model.forward = debugged
