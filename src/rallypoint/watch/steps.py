"""How long steps take, and how much of the time was lost to what."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_RATIO = 1.02  # of the bounds of two neighbouring classes: quantiles are right to 2 %
_SHORTEST_S = 1e-5
_STALL = 3.0  # a step that takes so many times the median is a stall
_OFTEN = 64  # the median is computed anew after so many steps, and in the first ones at each
_AT_ONCE_S = 1e-3  # steps that are announced so close together were done before
_MOST_AT_ONCE = 1000
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_ENOUGH = 10  # steps, before there is a median to compare with


@dataclass(frozen=True, slots=True)
class Counts:
    """A histogram's value: for each bound how many values were at most that high, of all, and their sum."""

    bounds: Sequence[float]
    cumulative: Sequence[int]
    count: int
    total: float


class Histogram:
    """Counts values by bounds. One thread adds, any may read: a reading may lack the value that is being added."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts, self._total = [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> Counts:
        """The counts until now."""
        cumulative, seen = list[int](), 0
        for count in list(self._counts):
            seen += count
            cumulative.append(seen)
        return Counts(self._bounds, cumulative[:-1], seen, self._total)


@dataclass(slots=True)
class Pace:
    """Measures the seconds between two steps that a coordinator announces.

    One that takes over from another announces at once the steps that were done meanwhile: those say nothing of how long
    a step takes, and are not measured.
    """

    _stepped: float | None = None  # when the last step was announced
    _catching_up: int = 0  # so many more steps may come at once
    _first: bool = False  # the next step is the first that this coordinator announces

    def begins(self) -> None:
        """A coordinator begins to announce steps. It may have taken over."""
        self._catching_up, self._first = _MOST_AT_ONCE, True

    def pause(self) -> None:
        """The next step cannot be measured: the job has ended, and may go on later."""
        self._stepped = None

    def step(self, now: float) -> float | None:
        """A step is announced at `now` (s). Returns how long it took; None if nobody knows."""
        before, self._stepped = self._stepped, now
        first, self._first = self._first, False
        if before is None:
            return None
        if self._catching_up and now - before < _AT_ONCE_S:
            self._catching_up -= 1
            return None
        self._catching_up *= first  # the first one ends the pause; those that were done in it come now
        return now - before


@dataclass(slots=True)
class StepTimes:
    """A histogram of the seconds between two steps, and the stalls among them.

    Attributes:
        total: the seconds of all steps.
        lost: cause -> the seconds by which stalls were longer than the median.
        stalls: the number of stalls.
        longest: (seconds, step, cause) of the longest stall.
        histogram: how many steps took at most so long, by BOUNDS_S.
    """

    total: float = 0.0
    lost: Counter[str] = field(default_factory=Counter)
    stalls: int = 0
    longest: tuple[float, int, str] = (0.0, -1, "")
    histogram: Histogram = field(default_factory=lambda: Histogram(BOUNDS_S))
    _classes: Counter[int] = field(default_factory=Counter)
    _count: int = 0
    _median: float = 0.0

    def add(self, step: int, seconds: float, cause: str) -> bool:
        """A step has taken so long; return whether that is a stall. `cause`: what happened meanwhile."""
        if self._count <= _OFTEN or self._count % _OFTEN == 0:
            self._median = self.quantile(0.5)
        median = self._median
        stall = self._count >= _ENOUGH and seconds > _STALL * median
        if stall:
            self.stalls += 1
            self.lost[cause] += seconds - median  # type: ignore[assignment]
            self.longest = max(self.longest, (seconds, step, cause))
        self.total += seconds
        self.histogram.add(seconds)
        self._count += 1
        self._classes[math.ceil(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S, _RATIO))] += 1
        return stall

    def quantile(self, share: float) -> float:
        """The seconds that this share of the steps took at most, to 2 %; 0 without steps."""
        seen, wanted = 0, share * self._count
        for number in sorted(self._classes):
            seen += self._classes[number]
            if seen >= wanted:
                return _SHORTEST_S * _RATIO**number
        return 0.0

    @property
    def goodput(self) -> float:
        """The share of the time that was not lost to stalls."""
        return 1.0 - sum(self.lost.values()) / self.total if self.total > 0 else 1.0
