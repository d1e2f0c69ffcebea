"""The leader's way to tell the other ranks of its worker what it does; a worker of one process has nobody to tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from rallypoint.parallel.group import Kind, Order, RankGroup
from rallypoint.worker.precision import Losses
from rallypoint.worker.ranks.figures import Figures, Logged

# What a rank does, for its board
COMPUTING = "computing step {step}, replica {replica}"
COMPUTED = "done with its replica, and waiting for the other ranks' losses"
GRADIENTS = "moving the replica's gradients to rank 0"
VERSION = "taking version {version} from rank 0"
EVALUATING = "in the evaluation of step {step}"

Values = Mapping[str, float] | None
LEFT_LOOP = (
    "the loop was left before the last step on rank {rank} of this worker, and the other ranks would wait for it for "
    "ever: call run.stop() to end the job early, and let the loop run on"
)


class Followers(Protocol):
    """What the other ranks must hear of, each before the leader does it."""

    def install(self, version: int) -> None:
        """A version is going to be copied to all ranks."""

    def compute(self, round: int, replica: int) -> None:
        """A replica is going to be computed."""

    def micro(self, *, has_loss: bool) -> None:
        """One of its micro-batches is computed, and has a loss on this rank, or not."""

    def agree(self, losses: Losses, weights: Sequence[float], logged: Logged) -> None:
        """All of its micro-batches are computed; `logged` are the figures that the script has logged on this rank."""

    def figures(self, loss: float, weight: float, logged: Logged) -> tuple[float, float, dict[str, float]]:
        """Return the replica's loss, weight and logged figures, given this rank's."""

    def stop(self) -> str | None:
        """Return the reason why another rank's script wants to stop the job, once; None: none wants to."""

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

    def agree(self, losses: Losses, weights: Sequence[float], logged: Logged) -> None:
        """Does nothing."""

    def figures(self, loss: float, weight: float, logged: Logged) -> tuple[float, float, dict[str, float]]:
        """Return what was given."""
        return loss, weight, logged.means()

    def stop(self) -> str | None:
        """Return None."""
        return None

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
        self._group.at(COMPUTING.format(step=round, replica=replica))
        self._group.tell(Order(Kind.COMPUTE, round, replica))

    def micro(self, *, has_loss: bool) -> None:
        self._has_loss.append(has_loss)

    def agree(self, losses: Losses, weights: Sequence[float], logged: Logged) -> None:
        values = losses.read()  # fewer after an error of the staging's thread, which is raised when gradients are sent
        self._group.at(COMPUTED)
        mine = [loss for loss, has in zip(values, self._has_loss, strict=False) if has]
        self._figures.agree(mine, weights[-1], logged)
        if not self._figures.finite and losses.finite():  # another rank's
            losses.examine(self._figures.loss)

    def figures(self, loss: float, weight: float, logged: Logged) -> tuple[float, float, dict[str, float]]:
        return self._figures.loss, self._figures.weight, self._figures.logged

    def stop(self) -> str | None:
        self._group.at("")  # here no rank waits for another
        reason, self._figures.stop = self._figures.stop, None
        return reason

    def evaluate(self, step: int, due: int) -> None:
        self._group.at(EVALUATING.format(step=step))
        self._group.tell(Order(Kind.EVALUATE, step, due))

    def result(self, values: Values) -> Values:
        return first_result(self._group, self._figures, values)

    def end(self, *, gone: bool, leads: bool) -> None:
        self._group.tell(Order(Kind.END, int(gone), int(leads)))


class _Result(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says after an evaluation: its result, and why its script wants to stop the job."""

    values: dict[str, float] | None
    stop: str | None


def first_result(group: RankGroup, figures: Figures, values: Values) -> Values:
    """Return the first rank's result of an evaluation that has one. All ranks call it.

    `figures.stop` is the same on all ranks afterwards.
    """
    mine = _Result(None if values is None else dict(values), figures.stop)
    data = msgspec.msgpack.encode(mine)  # not JSON, which has no NaN
    found = [msgspec.msgpack.decode(one, type=_Result) for one in group.all_bytes(data)]
    figures.stop = next((one.stop for one in found if one.stop is not None), None)
    return next((one.values for one in found if one.values is not None), None)
