"""What the leader of a worker's ranks tells the others, and what a worker says of one replica."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import torch

from rallypoint.core.typed import MOST_METRICS
from rallypoint.errors import UsageError
from rallypoint.parallel import OrderKind, RankGroup, RankOrder
from rallypoint.worker.precision import Losses

# ---- What a worker says of one replica: its loss and weight, as all ranks have it, and the script's figures ----


class RankSaid(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says of a replica. `loss` is None on a rank that has none; `stop` is the reason of `run.stop`."""

    part: int
    loss: float | None
    weight: float
    figures: dict[str, float]
    stop: str | None


def is_number(value: object) -> bool:
    """True for one real number: of Python, of numpy, or in a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    single = hasattr(value, "__float__") and getattr(value, "shape", ()) == ()
    complex_ = getattr(getattr(value, "dtype", None), "kind", "") == "c"  # numpy's have __float__ too
    return single and not complex_ and not isinstance(value, str)


class Logged:
    """The figures of one replica's micro-batches so far. Main thread only."""

    def __init__(self) -> None:
        self._values: dict[str, list[float | torch.Tensor]] = {}

    def add(self, figures: Mapping[str, float | torch.Tensor]) -> None:
        """Add figures of one micro-batch. Raises UsageError for too many names."""
        for name, value in figures.items():
            kept = value.detach().clone() if isinstance(value, torch.Tensor) else value
            self._values.setdefault(name, []).append(kept)
        if len(self._values) > MOST_METRICS:
            raise UsageError(f"micro.log got more than {MOST_METRICS} different names in one step")

    def means(self) -> dict[str, float]:
        """Return the mean of each over the micro-batches. Reading them waits for a device."""
        return {name: mean_of([float(value) for value in values]) for name, values in self._values.items()}


class Figures:
    """The figures of the replica that is being computed.

    Attributes:
        loss: the mean over the ranks that have one, each part of the batch once.
        weight: the replica's weight in the mean over replicas.
        finite: all losses are finite.
        logged: the script's own figures, as the loss: the mean over the parts of the batch.
        stop: the reason why the script wants to stop the job on this rank, or (after `agree`) on any; None: it does
            not.
    """

    def __init__(self, group: RankGroup, part: tuple[int, int]) -> None:
        self._group, self._part = group, part
        self.loss, self.weight, self.finite = math.nan, 1.0, True
        self.logged: dict[str, float] = {}
        self.stop: str | None = None

    def agree(self, losses: Sequence[float], weight: float, logged: Logged) -> None:
        """Exchange the figures with the other ranks; all ranks call it, and have the same afterwards.

        `losses` are those of this rank's micro-batches: none on a rank that has none (a stage that is not the last).
        `logged` are the figures that this rank's script has logged. Raises UsageError when the weights differ, or no
        rank has a loss.
        """
        mean = mean_of(losses) if losses else None
        mine = RankSaid(self._part[0], mean, float(weight), logged.means(), self.stop)
        encoded = msgspec.msgpack.encode(mine)  # not JSON, which has no NaN
        found = [msgspec.msgpack.decode(one, type=RankSaid) for one in self._group.all_bytes(encoded)]
        weights = {one.weight for one in found}
        if len(weights) > 1:
            raise UsageError(
                f"the ranks of this worker give weights of {sorted(weights)}: pass the same on all, of the whole "
                "micro-batch"
            )
        losses_of_parts = [(one.part, one.loss) for one in found if one.loss is not None]
        if not losses_of_parts:
            raise UsageError("no rank of this worker has a loss: pass it on the rank of the last stage")
        self.loss, self.weight = _mean_over_parts(losses_of_parts), weights.pop()
        self.finite = math.isfinite(self.loss)
        names = dict.fromkeys(name for one in found for name in one.figures)
        self.logged = {
            name: _mean_over_parts([(one.part, one.figures[name]) for one in found if name in one.figures])
            for name in names
        }
        self.stop = next((one.stop for one in found if one.stop is not None), None)


def _mean_over_parts(values: Sequence[tuple[int, float]]) -> float:
    """The mean of (part, value), of each part the first rank's."""
    first: dict[int, float] = {}
    for part, value in values:
        first.setdefault(part, value)
    return mean_of(list(first.values()))


def mean_of(values: Sequence[float]) -> float:
    """The mean, correctly rounded; NaN where infinities meet, of which `fsum` raises an error."""
    return (math.fsum(values) if all(map(math.isfinite, values)) else sum(values)) / len(values)


# ---- What the leader tells the other ranks; a worker of one process has nobody to tell ----


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


class RankFollowers:
    """What the other ranks must hear of, each before the leader does it. In a worker of one process nobody hears it."""

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
        return loss, weight, logged.means()

    def stop(self) -> str | None:
        """Return the reason why another rank's script wants to stop the job, once; None: none wants to."""
        return None

    def evaluate(self, step: int, due: int) -> None:
        """The evaluations whose bits are set in `due` are going to be run."""

    def result(self, values: Values) -> Values:
        """One of them has ended: return its result, given this rank's."""
        return values

    def end(self, *, gone: bool, leads: bool) -> None:
        """The loop is over; `gone`: because this worker was told to leave; `leads`: it is the one that saves."""


class OtherRanks(RankFollowers):
    """The followers of a group's leader."""

    def __init__(self, group: RankGroup, figures: Figures) -> None:
        self._group, self._figures = group, figures
        self._has_loss: list[bool] = []  # by micro-batch

    def install(self, version: int) -> None:
        self._group.tell(RankOrder(OrderKind.INSTALL, version))

    def compute(self, round: int, replica: int) -> None:
        self._has_loss = []
        self._group.at(COMPUTING.format(step=round, replica=replica))
        self._group.tell(RankOrder(OrderKind.COMPUTE, round, replica))

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
        self._group.tell(RankOrder(OrderKind.EVALUATE, step, due))

    def result(self, values: Values) -> Values:
        return first_result(self._group, self._figures, values)

    def end(self, *, gone: bool, leads: bool) -> None:
        self._group.tell(RankOrder(OrderKind.END, int(gone), int(leads)))


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
