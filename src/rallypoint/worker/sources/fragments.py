"""Local steps with fragments (streaming DiLoCo): a staggered round sends only some of the shards.

What a replica has changed and not sent yet is state of this worker, like its optimizer's state.

Host memory, beside what `worker/sources/local.py` takes: K bytes for each replica that this worker computes (its
parameters when its round began). K more for each where there are two or more replicas (its parameters while the model
holds another's); with one replica, only if this worker evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rallypoint.core.layout import Shard
from rallypoint.worker.sources.local import Drift, LocalStepsSource


class FragmentsSource(LocalStepsSource):
    """Contributes start - local of the shards of a round (LocalSteps with more than one fragment).

    `_start` is the whole version. A replica that made the round before on this worker continues from its own
    parameters, except for the shards installed since. Any other replica starts from the version.
    """

    # The replica whose parameters the model holds; None: it holds the version or nothing usable
    _in_model: int | None = None

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
        self._put_away()
        self._load(self._start)

    def begin_replica(self, round: int, replica: int) -> None:
        """Load the replica's own parameters and its own optimizer's state."""
        if self._in_model != replica:
            self._put_away()
        self._replica = replica
        inner = self._inner_of(round, replica)
        self._optimizer = inner.optimizer
        if (drift := inner.drift) is None:
            inner.drift = Drift(round, self._start.clone(), fresh=round)
            self._load(self._start)
        elif drift.round == round:
            drift.away = False
            self._load(drift.began)
        else:
            drift.round = round
            self._go_on(drift)
        self._in_model = replica

    def _go_on(self, drift: Drift) -> None:
        if drift.away and drift.left is not None:
            drift.began, drift.left, drift.away = drift.left, drift.began, False
            self._load(drift.began)
        else:
            self._save(drift.began)

    def _go_back(self) -> None:
        self._in_model = None  # no replica continues from these values

    def _put_away(self) -> None:
        """Save the parameters of the replica in the model, because the model will hold something else."""
        inner = None if self._in_model is None else self._inner.kept.get(self._in_model)
        self._in_model = None
        if inner is None or inner.drift is None:
            return
        if inner.drift.left is None:
            inner.drift.left = torch.empty_like(inner.drift.began)
        self._save(inner.drift.left)
        inner.drift.away = True

    @torch.no_grad()
    def _load(self, vector: torch.Tensor) -> None:
        for placed in self._tensors.parameters:
            placed.tensor.copy_(placed.of(vector))

    @torch.no_grad()
    def _save(self, vector: torch.Tensor) -> None:
        for placed in self._tensors.parameters:
            placed.of(vector).copy_(placed.tensor)
