"""Assigns replicas while a job runs: evenly, or by the workers' speeds if that has made steps shorter."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.placing.speeds import Speeds
from rallypoint.core.placing.view_change import AHEAD, following_assignments
from rallypoint.core.view import Assignment

# Tests whether assigning replicas by the workers' speeds pays: a new assignment is kept only if rounds get shorter.
#
# A speed is measured while other workers compute too. Workers that share a machine's cores slow each other down, and
# the one that begins first looks fast: then moving replicas gains nothing. So a trial compares how long a round (all R
# replicas of a step) takes before the new assignment and after it.


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


Assigned = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class Assigner:
    """Knows the workers' speeds and the assignment on trial. Every `now` is in seconds."""

    _speeds: Speeds = field(default_factory=Speeds)
    _trial: Trial = field(default_factory=Trial)
    _even: tuple[object, ...] = ()  # of what `better` has found last that nothing should change

    # ---- what is seen ----

    def computed(self, worker: str, step: int, replica: int, seconds: float, replicas: int, now: float) -> None:
        """Note that a worker has computed one of a step's `replicas` replicas, in `seconds`."""
        if self._speeds.computed(worker, step, replica, seconds, now):
            self._trial.computed(step, replicas, now)

    def forget(self, worker: str) -> None:
        self._speeds.forget(worker)

    def others_compute(self) -> None:
        """Measure rounds anew: other workers compute now."""
        self._trial.restart()

    def restart(self) -> None:
        """Start anew: a new generation begins, and steps will be computed again."""
        self._speeds.restart()
        self._trial.restart()

    # ---- what follows from it ----

    def assignments(
        self, assigned: Assigned, workers: Sequence[str], replicas: int, furthest: int, *, by_speed: bool
    ) -> tuple[Assignment, ...]:
        """The assignments after workers came or went. `assigned` is the present one, `furthest` the highest step seen.

        They follow speeds only if `by_speed` is True (replicas may move) and the last trial has paid.
        """
        speeds = self._speeds if self._trial.paid and by_speed else Speeds()
        return following_assignments(assigned, workers, replicas, furthest, speeds)

    def better(
        self, assigned: Assigned, workers: Sequence[str], replicas: int, furthest: int, now: float, *,
        adds_up: bool = False,
    ) -> tuple[str, tuple[Assignment, ...]] | None:  # fmt: skip
        """(why, assignments) if the same workers should have other replicas; None if nothing should change.

        The new assignment follows the speeds, if the present one is uneven for them; or it is the former one, if the
        trial has not paid.
        """
        start = furthest + AHEAD
        if (former := self._trial.verdict(now, start)) is not None:
            why = f"steps have not become shorter: from step {start} on replicas are assigned as before"
            return why, (Assignment(0, dict(assigned)), Assignment(start, dict(former)))
        self._speeds.fade(assigned, now)
        seconds = self._trial.round(now)
        if seconds is None:
            return None
        of = (self._speeds.revision, seconds, replicas, tuple(workers), assigned)
        if of == self._even:  # asked with each tick, and a tick takes long if there are many workers
            return None
        assignments: tuple[Assignment, ...] = ()
        if self._speeds.known(assigned):
            assignments = following_assignments(
                assigned, workers, replicas, furthest, self._speeds, seconds, adds_up=adds_up
            )
        if len(assignments) < 2:
            self._even = of
            return None
        self._trial.begin(assigned, seconds, start)
        shares = ", ".join(f"{worker} {len(own)}" for worker, own in sorted(assignments[-1].replicas.items()))
        why = f"workers are not equally fast: from step {start} on replicas are assigned by speed ({shares})"
        return why, assignments

    def straggler(
        self, assigned: Assigned, furthest: int, workers: Sequence[str], now: float
    ) -> tuple[str, int, int] | None:
        """(idle worker, step, replica): a late replica of step `furthest`, and a worker that could compute it too."""
        return self._speeds.straggler(assigned, furthest, workers, now)
