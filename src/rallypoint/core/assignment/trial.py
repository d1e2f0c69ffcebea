"""Tests whether assigning replicas by the workers' speeds pays: a new assignment is kept only if rounds get shorter.

A speed is measured while other workers compute too. Workers that share a machine's cores slow each other down, and the
one that begins first looks fast: then moving replicas gains nothing. So a trial compares how long a round (all R
replicas of a step) takes before the new assignment and after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

Assigned = Mapping[str, tuple[int, ...]]

ROUNDS = 4  # at least so many rounds are measured before a new assignment, and after it,
SECONDS = 2.0  # for at least so many seconds
PAUSE_S, _LONGEST_PAUSE_S = 30.0, 1920.0  # seconds between a trial that did not pay and the next; doubles each time
_PAID = 0.95  # a trial pays if a round takes at most so many times as long as before


@dataclass(slots=True)
class Trial:
    """The assignment on trial, if there is one. `paid`: the last trial has paid. Every `now` is in seconds."""

    paid: bool = False
    _former: Assigned | None = None  # the assignment to return to if the trial does not pay
    _before: float = 0.0  # seconds of a round under `_former`
    _start: int = 0  # rounds are measured from this step on
    _computed: int = 0  # replicas of the round in progress
    _ends: deque[float] = field(default_factory=deque)  # when the last rounds ended
    _pause: float = PAUSE_S
    _not_before: float = 0.0

    def computed(self, step: int, replicas: int, now: float) -> None:
        """Note that one more of a round's `replicas` replicas has been computed, for the first time."""
        if step < self._start:
            return
        self._computed += 1
        if self._computed < replicas:
            return
        self._computed = 0
        self._ends.append(now)
        while len(self._ends) > ROUNDS + 1 and now - self._ends[1] >= SECONDS:
            self._ends.popleft()

    def round(self, now: float) -> float | None:
        """The seconds of a round, which a new assignment has to beat.

        None while that is not known, while a trial is in progress, or during the pause after one that did not pay.
        """
        return self._seconds() if self._former is None and now >= self._not_before else None

    def begin(self, former: Assigned, seconds: float, start: int) -> None:
        """Begin a trial: a new assignment counts from step `start` on. Rounds took `seconds` under `former`."""
        self._former, self._before = former, seconds
        self._measure_from(start)

    def verdict(self, now: float, start: int) -> Assigned | None:
        """The former assignment, to return to from step `start` on, if the trial has ended and did not pay; else None.
        """
        seconds = self._seconds()
        if self._former is None or seconds is None:
            return None
        self.paid = seconds <= self._before * _PAID
        former, self._former = self._former, None
        if self.paid:
            self._pause = PAUSE_S
            return None
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        self._measure_from(start)
        return former

    def restart(self) -> None:
        """End the trial and measure anew: other workers compute, or steps are computed again."""
        self._former = None
        self._measure_from(0)

    def _measure_from(self, start: int) -> None:
        self._start, self._computed = start, 0
        self._ends.clear()

    def _seconds(self) -> float | None:
        """The mean seconds of a round; None while too few have been measured."""
        if len(self._ends) <= ROUNDS or self._ends[-1] - self._ends[0] < SECONDS:
            return None
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
