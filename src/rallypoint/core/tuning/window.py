"""The seconds of the steps of a trial, and what they say for certain."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

# How many of the shortest and of the longest of n steps to leave out, so that the median of all such steps is between
# the rest in at least 95 % of cases: whatever their distribution (order statistics, binomial(n, 1/2)).
_LEFT_OUT = {6: 0, 7: 0, 8: 0, 9: 1, 10: 1, 11: 1, 12: 2, 13: 2, 14: 2, 15: 3, 16: 3}


class Window(NamedTuple):
    """The median of some steps in seconds, and bounds between which it is in 95 % of cases (from six steps on)."""

    median: float
    low: float
    high: float
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Window:
        """That of these steps. Raises ValueError if there are none."""
        if not seconds:
            raise ValueError("no step was measured")
        ordered = sorted(seconds)
        out = _LEFT_OUT.get(len(ordered), max(0, (len(ordered) - 9) // 2) if len(ordered) > 16 else 0)
        return cls(median(ordered), ordered[out], ordered[-1 - out], len(ordered))
