"""Values by step in bounded memory: when there are too many points, two neighbours become one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_POINTS = 2048


@dataclass(slots=True)
class Point:
    """The values of the steps from `step` on, up to the next point."""

    step: int
    count: int
    total: float
    low: float
    high: float

    def add(self, other: Point) -> None:
        """Take in the values of a later point."""
        self.count += other.count
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass(slots=True)
class Series:
    """At most `most` points of values by step: each has the mean, the lowest and the highest value of `width` steps.

    Values that are not finite are counted in `odd`, and left out: JSON has none, and no axis can show them. A step
    that comes again replaces all points from it on: a run that went back computes them anew.

    Attributes:
        width: the steps of each point, a power of two.
        revision: rises with every change.
        whole: the revision in which a point other than the last ones was changed.
    """

    most: int = MOST_POINTS
    width: int = 1
    points: list[Point] = field(default_factory=list)
    revision: int = 0
    whole: int = 0
    odd: int = 0
    _last: int = -1  # the highest step that has come

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        if not math.isfinite(value):
            self.odd += 1
            return
        self.revision += 1
        if step <= self._last:
            self._go_back(step)
        self._last = step
        start = step - step % self.width
        new = Point(start, 1, value, value, value)
        if self.points and self.points[-1].step == start:
            self.points[-1].add(new)
        else:
            self.points.append(new)
        if len(self.points) > self.most:
            self._halve()

    def columns(self, start: int = 0) -> dict[str, list[float]]:
        """The points from step `start` on, as columns: step, mean, low, high."""
        shown = [point for point in self.points if point.step >= start]
        return {
            "step": [point.step for point in shown], "mean": [_short(point.total / point.count) for point in shown],
            "low": [_short(point.low) for point in shown], "high": [_short(point.high) for point in shown],
        }  # fmt: skip

    @property
    def end(self) -> int:
        """The step of the last point, which may still change; 0 if there is none."""
        return self.points[-1].step if self.points else 0

    def _go_back(self, step: int) -> None:
        """Forget what came from `step` on; the point that begins before it keeps what it has."""
        while self.points and self.points[-1].step >= step:
            self.points.pop()
        self.whole = self.revision

    def _halve(self) -> None:
        self.width *= 2
        merged: list[Point] = []
        for point in self.points:
            start = point.step - point.step % self.width
            if merged and merged[-1].step == start:
                merged[-1].add(point)
            else:
                point.step = start
                merged.append(point)
        self.points, self.whole = merged, self.revision


def _short(value: float) -> float:
    """The value with six digits: a page shows no more, and half as much has to be sent."""
    return float(f"{value:.6g}")
