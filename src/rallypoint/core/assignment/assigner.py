"""Assigns replicas while a job runs: evenly, or by the workers' speeds if that has made steps shorter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.assignment.speeds import Speeds
from rallypoint.core.assignment.trial import Trial
from rallypoint.core.cluster.events import Progress
from rallypoint.core.cluster.view_change import AHEAD, following_assignments
from rallypoint.core.view import Assignment

Assigned = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class Assigner:
    """Knows the workers' speeds and the assignment on trial. Every `now` is in seconds."""

    _speeds: Speeds = field(default_factory=Speeds)
    _trial: Trial = field(default_factory=Trial)
    _even: tuple[object, ...] = ()  # of what `better` has found last that nothing should change

    # ---- what is seen ----

    def computed(self, report: Progress, replicas: int, now: float) -> None:
        """Note that a worker has computed one of a step's `replicas` replicas."""
        if self._speeds.computed(report.worker, report.step, report.replica, report.seconds, now):
            self._trial.computed(report.step, replicas, now)

    def forget(self, worker: str) -> None:
        """Drop what is known of a worker that is gone."""
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
