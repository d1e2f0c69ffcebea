"""Streaming DiLoCo with overlap: a round's version is mixed in some steps later (Douillard et al., 2025).

A version does not replace a replica's own values at once. It is kept aside; after `delay` steps of the round it is
mixed with them. So the first steps of a round can be computed while its version is on its way.

Host memory, beside what `worker/sources/fragments.py` takes: K bytes more for each replica (its parameters when the
round before began), and the inner optimizer's state of that moment. That round may have to be computed again after the
next one has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rallypoint.core.layout import Shard
from rallypoint.core.view import ViewNumber
from rallypoint.worker.precision.losses import Losses
from rallypoint.worker.sources.fragments import FragmentsSource


@dataclass(slots=True)
class Ahead:
    """What the first steps of a replica's round came to, computed before the round's version arrived."""

    steps: int
    seconds: float
    losses: Losses
    weights: list[float]


class DelayedSource(FragmentsSource):
    """Contributes like FragmentsSource; an installed version is mixed in later (LocalSteps with a delay)."""

    _round = -1

    def begin_replica(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Begin like FragmentsSource: the replica continues from its own parameters, without the new version."""
        super().begin_replica(round, replica, generation)
        self._round = round

    def install(self) -> None:
        """Save what the replica in the model has changed since its round began."""
        self.show_version()

    def may_go_ahead(self, round: int, replica: int, generation: ViewNumber) -> bool:
        """True if the round's first steps need no version: this worker has the replica's round before."""
        return self._own.may_go_ahead(round, replica, generation)

    def resume_replica(self, round: int, replica: int) -> None:
        """The version is here: continue the round of a replica that has gone ahead."""
        self._replica, self._round = replica, round
        self._optimizer = self._own.resume(replica).optimizer

    def begin_step(self, step: int) -> None:
        """Begin a step. After `steps_ahead` steps of the round, mix the version in."""
        if step == self._config.steps_at(self._round) + self._config.steps_ahead(self._round):
            self._mix()
        super().begin_step(step)

    @torch.no_grad()
    def _mix(self) -> None:
        """Set the shards of the round before to mix * version + (1 - mix) * own."""
        local = self._config.local
        assert local is not None
        if not self._own.mixes(self._round, self._replica):
            return
        for shard, parts in self._parts:
            if not self._cadence.due(shard.index, self._round - 1):
                continue
            for placed, start, stop in parts:
                own = placed.words()[start - placed.entry.start : stop - placed.entry.start]
                new = self._start[start:stop].to(own.device)
                if local.mix != 1.0:  # round each product before the sum, so the cut into shards changes no byte
                    new = (own.float() * (1.0 - local.mix)).add_(new * local.mix)
                placed.write(start, new)

    def _replace(self, new: Sequence[Shard]) -> None:
        """Does nothing: `_mix` installs the new values later."""
