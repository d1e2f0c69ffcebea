"""What a worker says of one replica: its loss and weight, as all ranks have it, and the script's own figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import torch

from rallypoint.core.typed import MOST_METRICS
from rallypoint.errors import UsageError
from rallypoint.parallel.group import RankGroup


class Said(msgspec.Struct, frozen=True, array_like=True):
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
            self._values.setdefault(name, []).append(value)
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
        mine = Said(self._part[0], mean, weight, logged.means(), self.stop)
        encoded = msgspec.msgpack.encode(mine)  # not JSON, which has no NaN
        found = [msgspec.msgpack.decode(one, type=Said) for one in self._group.all_bytes(encoded)]
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
    """The mean, correctly rounded."""
    return math.fsum(values) / len(values)
