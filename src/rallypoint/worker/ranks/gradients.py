"""The leader's source of contributions: after a replica's last micro-batch, its gradient comes from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rallypoint.core.layout import Shard
from rallypoint.core.view import ViewNumber
from rallypoint.worker.exchange.exchange import Exchange, Rewound
from rallypoint.worker.ranks.figures import Figures
from rallypoint.worker.ranks.followers import GRADIENTS
from rallypoint.worker.ranks.tensors import LeaderTensors
from rallypoint.worker.sources.source import WaitsForVersions


class RankGradients(WaitsForVersions):
    """The gradient as contribution, of a worker of several ranks; see `DeltaSource`.

    Gradients stay on the ranks until the replica's end: a script's pipeline schedule may run several backward passes,
    and nobody may be unwound alone in the middle of a collective. A replica that has become stale is computed to its
    end, and what comes of it is dropped.
    """

    def __init__(self, tensors: LeaderTensors, exchange: Exchange, figures: Figures) -> None:
        self._tensors, self._exchange, self._figures = tensors, exchange, figures
        layout = exchange.layout
        self._shards_of = [
            [layout.shards[index] for index in layout.shards_touching(entry.start, entry.stop)] if spread.pieces else []
            for entry, spread in tensors.spread
        ]

    def remove(self) -> None:
        """Does nothing: the model has no hooks."""

    def installed(self, shards: Sequence[Shard] | None) -> None:
        """Does nothing: the servers hold the optimizer, so no version is kept here."""

    def show_version(self) -> None:
        """Does nothing: the model always holds the version."""

    def begin_replica(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Does nothing: the model holds the version that every replica starts from."""

    def begin_step(self, step: int) -> None:
        """Does nothing: a round is one step."""

    def begin_backward(self, weight: float, *, finite: Callable[[], bool], last: bool) -> None:
        """Does nothing: gradients are read when the replica ends."""

    def end_backward(self) -> None:
        """Does nothing: see `begin_backward`."""

    def end_step(self, *, finite: Callable[[], bool]) -> None:
        """Does nothing: see `begin_backward`."""

    def end_replica(self, replica: int) -> None:
        """Collect the gradients of all ranks, and the buffers if this replica contributes them, and send them.

        Raises Rewound, after all ranks have sent theirs, when they are stale.
        """
        self._tensors.at(GRADIENTS)
        try:
            self._send(replica)
        finally:
            self._tensors.at("")

    def _send(self, replica: int) -> None:
        pushes = self._exchange.replica
        pushes.weigh(self._figures.weight, finite=self._figures.finite)
        sends = _Sends(self._exchange)
        buffers = pushes.buffers_of(replica)
        for (entry, spread), shards in zip(self._tensors.spread, self._shards_of, strict=True):
            if entry.spec.group >= 0:
                sends.write(shards, entry.start, self._tensors.gradient(spread))
            elif buffers:
                sends.write(shards, entry.start, self._tensors.buffer_words(entry, spread))
            else:
                self._tensors.buffer_words(entry, spread)
        sends.end()
        pushes.computed()

    def abandon(self) -> None:
        """The replica in progress is stale."""
        self._exchange.replica.abandoned()


class _Sends:
    """Writes one replica's gradient into slots, tensor by tensor in the order of the layout, and sends full slots."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._claimed: dict[int, bool] = {}
        self._stale: Rewound | None = None

    def write(self, shards: Sequence[Shard], start: int, words: torch.Tensor) -> None:
        """Write a tensor's words (1-D fp32), which begin at word `start` of the vector, into these shards' slots."""
        for shard in shards:
            if self._claim(shard):
                first, last = max(start, shard.start), min(start + len(words), shard.stop)
                self._exchange.buffer[first:last].copy_(words[first - start : last - start])
        for shard in shards[:-1]:  # whatever comes next begins in or after the last one
            self._full(shard.index)

    def end(self) -> None:
        """Send the last slots. Raises Rewound if the replica has become stale."""
        for shard in list(self._claimed):
            self._full(shard)
        if self._stale is not None:
            raise self._stale

    def _claim(self, shard: Shard) -> bool:
        if self._stale is None and shard.index not in self._claimed:
            try:
                claimed = self._claimed[shard.index] = self._exchange.replica.claim(shard.index)
            except Rewound as stale:
                self._stale = stale
                return False
            if claimed and shard.role == "buffers":
                self._exchange.buffer[shard.start : shard.stop].zero_()  # there are gaps between buffers
        return self._stale is None and self._claimed[shard.index]

    def _full(self, shard: int) -> None:
        if self._claimed.get(shard) and self._stale is None:
            self._claimed[shard] = False
            self._exchange.replica.filled(shard)
