"""The losses that a run has recorded in ``events.jsonl``, and the first that stands out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rallypoint.watch.follow import rows_of

_WINDOW, _FEWEST = 32, 5  # steps before a spike that say what is usual
_SPREADS = 8.0  # a spike is so many usual deviations above the median
_LEAST = 0.25  # and at least this share of the median
_FAILED = re.compile(r"the loss of replica \d+ at step (\d+) is (nan|inf|-inf)")


class Spike(NamedTuple):
    """A step whose loss stands out, and the median loss of the steps before it (nan: there are too few)."""

    step: int
    loss: float
    usual: float


def recorded_losses(folder: Path) -> dict[int, float]:
    """Return the mean loss by step, the newest where a step was made again. A loss that ended the run is in it too.

    Raises DataError without a log.
    """
    found: dict[int, float] = {}
    for run in rows_of(folder):
        if run.row is not None and "loss" in run.row[1]:
            found[run.row[0]] = run.row[1]["loss"]
        elif failed := _FAILED.search(run.why):
            found[int(failed[1])] = float(failed[2])
    return dict(sorted(found.items()))


def first_spike(losses: Mapping[int, float]) -> Spike | None:
    """Return the first step whose loss is not finite, or far above the median of the 32 steps before; None: no such.

    Far is more than 8 usual deviations (1.4826 times the median distance from the median), and a quarter of the median.
    """
    before: list[float] = []
    for step, loss in losses.items():
        usual = median(before) if len(before) >= _FEWEST else math.nan
        if not math.isfinite(loss):
            return Spike(step, loss, usual)
        if len(before) >= _FEWEST:
            spread = 1.4826 * median(abs(one - usual) for one in before)
            if loss - usual > max(_SPREADS * spread, _LEAST * abs(usual)):
                return Spike(step, loss, usual)
        before = [*before[1 - _WINDOW :], loss]
    return None
