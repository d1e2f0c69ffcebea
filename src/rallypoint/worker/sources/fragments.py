"""Local steps with fragments (streaming DiLoCo), and with a delay: a round sends only some of the shards.

What a replica has changed and not sent yet is state of this worker, like its optimizer's state.

Host memory, beside what `worker/sources/local.py` takes: K bytes for each replica that this worker computes (its
parameters when its round began). K more for each where there are two or more replicas (its parameters while the model
holds another's); with one replica, only if this worker evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.local import OwnParameters
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.precision import Losses
from rallypoint.worker.sources.local import LocalStepsSource, _Inner
from rallypoint.worker.sources.staging import Staging
from rallypoint.worker.tensors import ModelTensors


class FragmentsSource(LocalStepsSource):
    """Contributes start - local of the shards of a round (LocalSteps with more than one fragment).

    `_start` is the whole version. A replica that made the round before on this worker continues from its own
    parameters, except for the shards installed since. Any other replica starts from the version.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: ModelTensors, config: JobConfig, exchange: Exchange, staging: Staging,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(model, tensors, config, exchange, staging, say)
        assert config.local is not None
        self._flat = _FlatModel(tensors, self._start)
        self._own: OwnParameters[_Inner, torch.Tensor] = OwnParameters(
            self._inner, self._flat, delayed=config.local.delay > 0
        )

    @torch.no_grad()
    def installed(self, shards: Sequence[Shard] | None) -> None:
        """Replace the new shards in the parameters of every replica."""
        new = [shard for shard, _ in self._parts] if shards is None else shards
        for shard in new:
            for placed, start, stop in self._tensors.parts_in(shard):
                first = placed.entry.start
                self._start[start:stop].copy_(placed.words()[start - first : stop - first])
        self._replace(new)

    def _replace(self, new: Sequence[Shard]) -> None:
        for inner in self._inner.kept.values():
            if inner.drift is not None and inner.drift.left is not None:
                for shard in new:
                    inner.drift.left[shard.start : shard.stop] = self._start[shard.start : shard.stop]

    def show_version(self) -> None:
        """Save the parameters of the replica in the model, then load the version."""
        self._own.put_away()
        self._flat.load(self._start)

    def begin_replica(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Load the replica's own parameters and its own optimizer's state."""
        self._replica = replica
        self._optimizer = self._own.begin(round, replica, generation).optimizer

    def _go_back(self) -> None:
        self._own.drop()


class _FlatModel:
    """The model's parameters as one flat vector on the host; `start` is the version."""

    def __init__(self, tensors: ModelTensors, start: torch.Tensor) -> None:
        self._tensors, self._start = tensors, start

    def version(self) -> torch.Tensor:
        return self._start.clone()

    @torch.no_grad()
    def load(self, values: torch.Tensor) -> None:
        for placed in self._tensors.parameters:
            placed.tensor.copy_(placed.of(values))

    @torch.no_grad()
    def save(self, spare: torch.Tensor | None) -> torch.Tensor:
        into = torch.empty_like(self._start) if spare is None else spare
        for placed in self._tensors.parameters:
            placed.of(into).copy_(placed.tensor)
        return into


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
