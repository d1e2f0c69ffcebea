"""Does assigning replicas by the workers' speeds pay? Each such assignment is a trial, kept if rounds become shorter.

A speed is measured while others compute. Workers that share a machine's cores slow each other down, and whichever
happens to begin first looks fast: then replicas would move for nothing, or worse. What counts is how long a round,
all R replicas of a step, takes before the assignment and after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

Assigned = Mapping[str, tuple[int, ...]]

ROUNDS = 4  # that are measured before an assignment, and of it;
SECONDS = 2.0  # and they last at least so long
PAUSE_S, _LONGEST_PAUSE_S = 30.0, 1920.0  # after one that has not paid; twice as long after each further one
_PAID = 0.95  # times as long as before that a round may take


@dataclass(slots=True)
class Trial:
    """The assignment on trial, if there is one. `paid`: the last one has, so speeds count from then on."""

    paid: bool = False
    _former: Assigned | None = None  # to be returned to
    _before: float = 0.0  # seconds of a round then
    _start: int = 0  # rounds are measured from this step on
    _computed: int = 0  # replicas of the round in progress
    _ends: deque[float] = field(default_factory=deque)  # of the last rounds
    _pause: float = PAUSE_S
    _not_before: float = 0.0

    def computed(self, step: int, replicas: int, now: float) -> None:
        """One more of a round's `replicas` has been computed, for the first time."""
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
        """Seconds of a round, which another assignment would have to beat.

        None while it is not known, or while none is to be tried yet.
        """
        return self._seconds() if self._former is None and now >= self._not_before else None

    def begin(self, former: Assigned, seconds: float, start: int) -> None:
        """Another assignment than `former`, whose rounds took so many seconds, counts from step `start` on."""
        self._former, self._before = former, seconds
        self._measure_from(start)

    def verdict(self, now: float, start: int) -> Assigned | None:
        """The assignment to return to from step `start` on, once it is known that the one on trial has not paid."""
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
        """Somebody came or went, or steps are computed again: what was measured says nothing about what follows."""
        self._former = None
        self._measure_from(0)

    def _measure_from(self, start: int) -> None:
        self._start, self._computed = start, 0
        self._ends.clear()

    def _seconds(self) -> float | None:
        """Of a round; None while too few have been measured."""
        if len(self._ends) <= ROUNDS or self._ends[-1] - self._ends[0] < SECONDS:
            return None
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
