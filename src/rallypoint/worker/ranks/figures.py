"""What the ranks of a worker say of one replica: its loss, its weight, and whether the loss is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rallypoint.errors import UsageError
from rallypoint.parallel.group import RankGroup


class Figures:
    """The figures of the replica that is being computed.

    Attributes:
        loss: the mean over the ranks that have one, each part of the batch once.
        weight: the replica's weight in the mean over replicas.
        finite: all losses are finite.
    """

    def __init__(self, group: RankGroup, part: tuple[int, int]) -> None:
        self._group, self._part = group, part
        self.loss, self.weight, self.finite = math.nan, 1.0, True

    def agree(self, losses: Sequence[float], weight: float) -> None:
        """Exchange the figures with the other ranks; all ranks call it, and have the same afterwards.

        `losses` are those of this rank's micro-batches: none on a rank that has none (a stage that is not the last).
        Raises UsageError when the weights differ, or no rank has a loss.
        """
        mean = math.fsum(losses) / len(losses) if losses else 0.0
        found = self._group.all_numbers([float(self._part[0]), float(bool(losses)), mean, weight])
        weights = {its for _, _, _, its in found}
        if len(weights) > 1:
            raise UsageError(
                f"the ranks of this worker give weights of {sorted(weights)}: pass the same on all, of the whole "
                "micro-batch"
            )
        self.loss = _mean_over_parts([(int(part), loss) for part, has, loss, _ in found if has])
        self.weight, self.finite = weights.pop(), math.isfinite(self.loss)


def _mean_over_parts(losses: Sequence[tuple[int, float]]) -> float:
    first: dict[int, float] = {}
    for part, loss in losses:
        first.setdefault(part, loss)
    if not first:
        raise UsageError("no rank of this worker has a loss: pass it on the rank of the last stage")
    return math.fsum(first.values()) / len(first)
