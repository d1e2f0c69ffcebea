"""Local steps with fragments (streaming DiLoCo): a staggered round sends only some of the shards.

What a replica has changed and not sent yet is state of this worker, like its optimizer's state.

Host memory, beside what `worker/sources/local.py` takes: K bytes for each replica that this worker computes (its
parameters when its round began). K more for each where there are two or more replicas (its parameters while the model
holds another's); with one replica, only if this worker evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.local.drift import OwnParameters
from rallypoint.worker.exchange.exchange import Exchange
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
