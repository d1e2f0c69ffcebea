"""What the names of a simulated job stand for: a few floats, with which the product's own shards compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rallypoint.config import JobConfig
from rallypoint.core.optimizer import EMA, Average, takes
from rallypoint.core.shard.effects import Apply
from rallypoint.optim import RowsOptimizer, ShardOptimizer
from rallypoint.store.record import AVERAGE, AVERAGED

WORDS = 16  # of a shard
ROWS, COLUMNS = 4, 4  # of a part of a table


@dataclass
class Floats:
    """By name: fp32, shape (WORDS,). What no method here has made is a contribution, or a first version: its floats
    follow from its name alone."""

    _known: dict[int, torch.Tensor] = field(default_factory=dict)
    _moments: dict[int, tuple[dict[str, torch.Tensor], dict[str, float]]] = field(default_factory=dict)
    _averages: dict[int, tuple[torch.Tensor, float]] = field(default_factory=dict)  # with the number of versions in it
    _rows: dict[int, int] = field(default_factory=dict)  # of a table: a gradient's rows, as bits; those of the last one
    _optimizers: dict[tuple[int, bool], ShardOptimizer | RowsOptimizer] = field(default_factory=dict)

    def of(self, name: int) -> torch.Tensor:
        """The floats, which nobody may change."""
        if name not in self._known:
            made = np.random.default_rng(abs(name)).standard_normal(WORDS, dtype=np.float32)
            made.reshape(ROWS, -1)[[row for row in range(ROWS) if not self._rows.get(name, -1) >> row & 1]] = 0.0
            self._known[name] = torch.from_numpy(made)
        return self._known[name]

    def sparse(self, name: int) -> int:
        """`name` is a contribution to a part of a table: it has some of its rows, or none."""
        self._rows[name] = name % (1 << ROWS)
        return name

    def rows(self, name: int) -> torch.Tensor:
        """The rows of a gradient, or those that the last update of this version has changed: int64, ascending."""
        found = [row for row in range(ROWS) if self._rows.get(name, 0) >> row & 1]
        return torch.tensor(found, dtype=torch.int64, device="cpu")

    def begins(self, name: int, values: Sequence[float]) -> None:
        """`name` is these, and zeros behind them."""
        known = [*values, *[0.0] * (WORDS - len(values))]
        self._known.setdefault(name, torch.tensor(known, dtype=torch.float32, device="cpu"))

    def moments(self, name: int, *, averaged: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """What servers have beside these parameters: see `ShardOptimizer.state`, and `ShardAverage.state`."""
        arrays, numbers = self._moments.get(name, ({}, {}))
        if averaged:
            average, count = self._averages.get(name, (self.of(name), 0.0))
            return arrays | {AVERAGE: average}, numbers | {AVERAGED: count}
        return arrays, numbers

    def compensated(self, name: int, gradient: int, now: int, then: int, factor: float) -> None:
        """`name` is a gradient that was computed from other parameters: see `OwnedShard.compensate`."""
        late, moved = self.of(gradient), self.of(now) - self.of(then)
        self._known.setdefault(name, torch.addcmul(late, moved * late, late, value=factor))

    def sum(self, name: int, left: int, right: int) -> int:
        """`name` is a node of the tree."""
        if name not in self._known and left in self._rows:
            self._rows[name] = self._rows[left] | self._rows[right]
        self._known.setdefault(name, self.of(left) + self.of(right))
        return name

    def scaled(self, name: int, finished: int, scale: float) -> None:
        """`name` is a gradient that was clipped, or a mean, or (1.0) a copy."""
        if finished in self._rows:
            self._rows[name] = self._rows[finished]
        self._known.setdefault(name, self.of(finished) * scale)

    def updated(self, name: int, master: int, finished: int, update: Apply, config: JobConfig, group: int) -> None:
        """`name` is what the optimizer makes of `master` with this gradient."""
        if name in self._known:
            return
        sparse, values = finished in self._rows, self.of(finished).clone()
        if (group, sparse) not in self._optimizers:
            made = RowsOptimizer(config, group, ROWS, COLUMNS) if sparse else ShardOptimizer(config, group, WORDS)
            self._optimizers[group, sparse] = made
        optimizer = self._optimizers[group, sparse]
        optimizer.master.view(-1).copy_(self.of(master))
        optimizer.load(*self.moments(master))
        if isinstance(optimizer, RowsOptimizer):
            self._rows[name], changed = self._rows[finished], self.rows(finished)
            optimizer.apply(changed, values.view(ROWS, COLUMNS)[changed], update.step, update.rate)
        else:
            optimizer.apply(values, update.step, update.rate, update.reductions)
        moments, numbers = optimizer.state()
        self._known[name] = optimizer.master.view(-1).clone()
        self._moments[name] = {key: of.reshape(-1).clone() for key, of in moments.items()}, numbers
        if config.average is not None:
            before = self._averages.get(master, (self.of(master), 0.0))
            self._averages[name] = _averaged(config.average, self._known[name], *before, update.step + 1)


def _averaged(spec: Average, new: torch.Tensor, average: torch.Tensor, count: float, update: int) -> Any:
    """The average of so many versions, after an update with this number has made `new`."""
    if not takes(spec, update):
        return average, count
    if isinstance(spec, EMA):
        return torch.lerp(average, new, 1.0 - spec.decay) if count else new, count + 1
    return average + (new - average) / (count + 1) if count else new, count + 1
