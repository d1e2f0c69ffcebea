"""What the names of a simulated job stand for: a few floats, with which the product's own shards compute."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rallypoint.config import JobConfig
from rallypoint.core.shard.effects import Apply
from rallypoint.optim import ShardOptimizer

WORDS = 16  # of a shard


@dataclass
class Floats:
    """By name: fp32, shape (WORDS,). What no method here has made is a contribution, or a first version: its floats
    follow from its name alone."""

    _known: dict[int, torch.Tensor] = field(default_factory=dict)
    _moments: dict[int, tuple[dict[str, torch.Tensor], dict[str, float]]] = field(default_factory=dict)

    def of(self, name: int) -> torch.Tensor:
        """The floats, which nobody may change."""
        if name not in self._known:
            made = np.random.default_rng(abs(name)).standard_normal(WORDS, dtype=np.float32)
            self._known[name] = torch.from_numpy(made)
        return self._known[name]

    def moments(self, name: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """What the optimizer has beside these parameters: see `ShardOptimizer.state`."""
        return self._moments.get(name, ({}, {}))

    def sum(self, name: int, left: int, right: int) -> int:
        """`name` is a node of the tree."""
        self._known.setdefault(name, self.of(left) + self.of(right))
        return name

    def mean(self, name: int, total: int, weight: float) -> int:
        """`name` is the mean of contributions of this weight."""
        self._known.setdefault(name, self.of(total) * (1.0 / weight))
        return name

    def scaled(self, name: int, finished: int, scale: float) -> None:
        """`name` is a gradient that was clipped, or (1.0) a copy."""
        self._known.setdefault(name, self.of(finished) * scale)

    def updated(self, name: int, master: int, finished: int, update: Apply, config: JobConfig, group: int) -> None:
        """`name` is what the optimizer makes of `master` with this gradient."""
        if name in self._known:
            return
        optimizer = ShardOptimizer(config, group, WORDS)
        optimizer.master.copy_(self.of(master))
        optimizer.load(*self.moments(master))
        optimizer.apply(self.of(finished).clone(), update.step, update.rate, update.reductions)
        moments, numbers = optimizer.state()
        self._known[name] = optimizer.master
        self._moments[name] = {key: of.clone() for key, of in moments.items()}, numbers
