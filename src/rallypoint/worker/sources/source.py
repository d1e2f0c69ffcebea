"""What a mode does on the worker: it makes the contributions of one replica after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rallypoint.core.layout import Shard
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.tensors import ModelTensors


class DeltaSource(Protocol):
    """The worker's side of a mode, between two versions. All of it is called on the main thread.

    Of each replica: `begin_replica`; for each of its steps in the round `begin_step`, then `begin_backward`, the
    backward pass and `end_backward` of each micro-batch, then `end_step`; at last `end_replica`. Or, at any place,
    `abandon`.
    """

    def install(self) -> None:
        """A new version is about to be copied into the model."""

    def installed(self, shards: Sequence[Shard] | None) -> None:
        """The model holds a new version: of these shards, or (None) all of it is new."""

    def show_version(self) -> None:
        """The model is to be evaluated: from now on it is the version, and nothing that a replica has moved."""

    def may_go_ahead(self, round: int, replica: int) -> bool:
        """Can the replica make the first steps of this round (`steps_ahead`) before the round's version is here?"""

    def resume_replica(self, round: int, replica: int) -> None:
        """The version is here: a replica that has gone ahead goes on in its round."""

    def begin_replica(self, round: int, replica: int) -> None:
        """A replica's round begins: from now on the model is what that replica starts from."""

    def begin_step(self, step: int) -> None:
        """A step begins."""

    def begin_backward(self, weight: float, *, finite: bool, last: bool) -> None:
        """A backward pass begins: the replica's weight and whether its losses so far are finite.

        With `last` it is that of the round's last micro-batch.
        """

    def end_backward(self) -> None:
        """The backward pass is over: gradients that come now are the script's own."""

    def end_step(self, *, finite: bool) -> None:
        """The step's gradient is whole; `finite`: so were all of its losses. Rewound as of `Exchange.check`."""

    def end_replica(self, replica: int) -> None:
        """The round is over: whatever has not left leaves now, the buffers too if this is replica 0.

        Rewound when what was computed is stale.
        """

    def abandon(self) -> None:
        """The replica in progress is stale: forget it."""

    def remove(self) -> None:
        """The run is over: leave the model alone."""


class WaitsForVersions:
    """A source whose replicas begin each round at the round's version: none of them goes ahead."""

    def install(self) -> None:
        """The model holds nothing that is to be kept."""

    def may_go_ahead(self, round: int, replica: int) -> bool:
        return False

    def resume_replica(self, round: int, replica: int) -> None:
        raise AssertionError(f"replica {replica} has not gone ahead in round {round}")


def send_buffers(tensors: ModelTensors, exchange: Exchange) -> None:
    """Push the model's buffers as replica 0 has left them: those shards of them that are wanted."""
    buffer, layout = exchange.buffer, exchange.layout
    places = [place for place in layout.shards if place.role == "buffers"]
    wanted = {place.index for place in places if exchange.replica.claim(place.index)}
    if not wanted:
        return
    whole = torch.zeros(places[-1].stop - places[0].start)
    for placed in tensors.buffers:
        placed.of_part(whole, places[0].start).copy_(placed.tensor)
    for place in places:
        if place.index in wanted:
            buffer[place.start : place.stop].copy_(whole[place.start - places[0].start :][: place.words])
            exchange.replica.filled(place.index)
