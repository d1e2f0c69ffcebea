"""The average of one dense shard's parameters over its versions (rp.EMA, rp.SWA)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rallypoint.core.optimizer import EMA, Average, takes
from rallypoint.store.record import AVERAGE, AVERAGED


class ShardAverage:
    """Owns one average (fp32, shape (words,)), which begins as the first version that it takes. Owner thread only.

    Memory: a shard's bytes.
    """

    def __init__(self, spec: Average, master: torch.Tensor) -> None:
        self._spec, self._master = spec, master
        self.values = torch.zeros_like(master)
        self._averaged = 0

    def begin(self) -> None:
        """The parameters have their first values: nothing is averaged yet."""
        self.values.copy_(self._master)
        self._averaged = 0

    def update(self, version: int) -> None:
        """Take the parameters that update number `version` (from 1) has made."""
        if not takes(self._spec, version):
            return
        if not self._averaged:
            self.values.copy_(self._master)
        elif isinstance(self._spec, EMA):
            self.values.lerp_(self._master, 1.0 - self._spec.decay)
        else:
            self.values.add_((self._master - self.values).div_(self._averaged + 1))
        self._averaged += 1

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The average, not copied, and the number of versions in it, by their names in a record."""
        return {AVERAGE: self.values}, {AVERAGED: float(self._averaged)}

    def load(self, arrays: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
        """Go on from a record's state. A snapshot of a job that had no average has none: then it begins here."""
        if AVERAGE not in arrays:
            self.begin()
            return
        self.values.copy_(arrays[AVERAGE])
        self._averaged = int(scalars.get(AVERAGED, 0.0))
