"""The interface of a mode's worker side: it makes the contributions of one replica after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from rallypoint.core.layout import Shard
from rallypoint.core.view import ViewNumber
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.tensors import ModelTensors


class DeltaSource(Protocol):
    """The worker's side of a mode, between two versions. All methods are called on the main thread.

    Calls for each replica: `begin_replica`; for each step of the round `begin_step`, then for each micro-batch
    `begin_backward`, the backward pass and `end_backward`, then `end_step`; at last `end_replica`. Or, at any point,
    `abandon`.
    """

    def install(self) -> None:
        """A new version is about to be copied into the model."""

    def installed(self, shards: Sequence[Shard] | None) -> None:
        """The model holds a new version. `shards` are those that changed; None: all."""

    def show_version(self) -> None:
        """Load the version into the model for an evaluation."""

    def may_go_ahead(self, round: int, replica: int, generation: ViewNumber) -> bool:
        """True if the replica can compute this round's first `steps_ahead` steps before its version is here."""

    def resume_replica(self, round: int, replica: int) -> None:
        """The version is here: continue the round of a replica that has gone ahead."""

    def begin_replica(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Begin a replica's round: load what that replica starts from into the model.

        `generation` is the one that was in force when the main thread decided on it: the next may come at any time.
        """

    def begin_step(self, step: int) -> None:
        """A step begins."""

    def begin_backward(self, weight: float, *, finite: Callable[[], bool], last: bool) -> None:
        """Begin a backward pass. `weight` is the replica's; `finite` tells whether all of its losses so far are.

        `last`: this is the round's last micro-batch. Call `finite` in ``staging.then``: by then the losses are here.
        """

    def end_backward(self) -> None:
        """The backward pass is over. Gradients that are computed now belong to the script."""

    def end_step(self, *, finite: Callable[[], bool]) -> None:
        """The step's gradient is complete. `finite` waits for the device, and tells whether its losses are finite.

        Raises Rewound like `Exchange.check`.
        """

    def end_replica(self, replica: int) -> None:
        """The round is over: send what was not sent yet, what the replica carries, and the buffers if it is replica 0.

        Raises Rewound when what was computed is stale.
        """

    def abandon(self) -> None:
        """The replica in progress is stale: drop its work."""

    def remove(self) -> None:
        """The run is over: take every hook off the model."""


class WaitsForVersions:
    """A source whose replicas start each round from the round's version, so none of them goes ahead."""

    def install(self) -> None:
        """Does nothing: the model holds no values that must be saved."""

    def may_go_ahead(self, round: int, replica: int, generation: ViewNumber) -> bool:
        return False

    def resume_replica(self, round: int, replica: int) -> None:
        raise AssertionError(f"replica {replica} has not gone ahead in round {round}")


def send_buffers(tensors: ModelTensors, exchange: Exchange, replica: int) -> None:
    """Push what the replica has left in buffers: in the model's if it is replica 0, and in those of what it carries.

    Only those of their shards that the servers need are sent.
    """
    places = exchange.replica.buffers_of(replica)
    wanted = [place for place in places if exchange.replica.claim(place.index)]
    if not wanted:
        return
    start, stop = places[0].start, places[-1].stop
    whole = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
    for placed in tensors.buffers:
        if start <= placed.entry.start and placed.entry.stop <= stop:
            placed.of_part(whole, start).copy_(placed.tensor)
    for place in wanted:
        exchange.memory.words(place.index).copy_(whole[place.start - start :][: place.words])
        exchange.replica.filled(place.index)
