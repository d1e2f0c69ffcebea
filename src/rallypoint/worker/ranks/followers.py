"""The leader's way to tell the other ranks of its worker what it does; a worker of one process has nobody to tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from rallypoint.parallel.group import Kind, Order, RankGroup
from rallypoint.worker.precision.losses import Losses
from rallypoint.worker.ranks.figures import Figures

Values = Mapping[str, float] | None


class Followers(Protocol):
    """What the other ranks must hear of, each before the leader does it."""

    def install(self, version: int) -> None:
        """A version is going to be copied to all ranks."""

    def compute(self, round: int, replica: int) -> None:
        """A replica is going to be computed."""

    def micro(self, *, has_loss: bool) -> None:
        """One of its micro-batches is computed, and has a loss on this rank, or not."""

    def agree(self, losses: Losses, weights: Sequence[float]) -> None:
        """All of its micro-batches are computed."""

    def figures(self, loss: float, weight: float) -> tuple[float, float]:
        """Return the replica's loss and weight, given this rank's."""

    def evaluate(self, step: int, due: int) -> None:
        """The evaluations whose bits are set in `due` are going to be run."""

    def result(self, values: Values) -> Values:
        """One of them has ended: return its result, given this rank's."""

    def end(self, *, gone: bool, leads: bool) -> None:
        """The loop is over; `gone`: because this worker was told to leave; `leads`: it is the one that saves."""


class NoFollowers:
    """The `Followers` of a worker of one process."""

    def install(self, version: int) -> None:
        """Does nothing."""

    def compute(self, round: int, replica: int) -> None:
        """Does nothing."""

    def micro(self, *, has_loss: bool) -> None:
        """Does nothing."""

    def agree(self, losses: Losses, weights: Sequence[float]) -> None:
        """Does nothing."""

    def figures(self, loss: float, weight: float) -> tuple[float, float]:
        """Return what was given."""
        return loss, weight

    def evaluate(self, step: int, due: int) -> None:
        """Does nothing."""

    def result(self, values: Values) -> Values:
        """Return what was given."""
        return values

    def end(self, *, gone: bool, leads: bool) -> None:
        """Does nothing."""


class OtherRanks:
    """The `Followers` of a group's leader."""

    def __init__(self, group: RankGroup, figures: Figures) -> None:
        self._group, self._figures = group, figures
        self._has_loss: list[bool] = []  # by micro-batch

    def install(self, version: int) -> None:
        self._group.tell(Order(Kind.INSTALL, version))

    def compute(self, round: int, replica: int) -> None:
        self._has_loss = []
        self._group.tell(Order(Kind.COMPUTE, round, replica))

    def micro(self, *, has_loss: bool) -> None:
        self._has_loss.append(has_loss)

    def agree(self, losses: Losses, weights: Sequence[float]) -> None:
        values = losses.read()  # fewer after an error of the staging's thread, which is raised when gradients are sent
        self._figures.agree([loss for loss, has in zip(values, self._has_loss, strict=False) if has], weights[-1])
        if not self._figures.finite and losses.finite():  # another rank's
            losses.examine(self._figures.loss)

    def figures(self, loss: float, weight: float) -> tuple[float, float]:
        return self._figures.loss, self._figures.weight

    def evaluate(self, step: int, due: int) -> None:
        self._group.tell(Order(Kind.EVALUATE, step, due))

    def result(self, values: Values) -> Values:
        return first_result(self._group, values)

    def end(self, *, gone: bool, leads: bool) -> None:
        self._group.tell(Order(Kind.END, int(gone), int(leads)))


def first_result(group: RankGroup, values: Values) -> Values:
    """Return the first rank's result of an evaluation that has one. All ranks call it."""
    data = msgspec.msgpack.encode(values)  # not JSON, which has no NaN
    found = [msgspec.msgpack.decode(one, type=dict[str, float] | None) for one in group.all_bytes(data)]
    return next((one for one in found if one is not None), None)
