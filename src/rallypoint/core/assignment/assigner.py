"""Who computes which replica while a job runs: evenly, or by the workers' speeds where that has been seen to pay."""

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
    """Knows the workers' speeds, and the assignment that is on trial."""

    _speeds: Speeds = field(default_factory=Speeds)
    _trial: Trial = field(default_factory=Trial)

    # ---- what is seen ----

    def computed(self, report: Progress, replicas: int, now: float) -> None:
        """A worker has computed one of a step's `replicas`."""
        if self._speeds.computed(report.worker, report.step, report.replica, report.seconds, now):
            self._trial.computed(report.step, replicas, now)

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._speeds.forget(worker)

    def others_compute(self) -> None:
        """Somebody came or went: what rounds took says nothing about those that follow."""
        self._trial.restart()

    def restart(self) -> None:
        """Steps will be computed again."""
        self._speeds.restart()
        self._trial.restart()

    # ---- what follows from it ----

    def assignments(
        self, assigned: Assigned, workers: Sequence[str], replicas: int, furthest: int, *, by_speed: bool
    ) -> tuple[Assignment, ...]:
        """The assignments when others compute than do now, with these `assigned`.

        They follow speeds only where replicas may move `by_speed`, and where that has paid.
        """
        speeds = self._speeds if self._trial.paid and by_speed else Speeds()
        return following_assignments(assigned, workers, replicas, furthest, speeds)

    def better(
        self, assigned: Assigned, workers: Sequence[str], replicas: int, furthest: int, now: float
    ) -> tuple[str, tuple[Assignment, ...]] | None:
        """Other assignments among the same workers, and why; None when nothing is to change.

        By speed, if a worker has become slower or faster than its assignment assumes; or the former one, if the trial
        has not paid.
        """
        start = furthest + AHEAD
        if (former := self._trial.verdict(now, start)) is not None:
            why = f"steps have not become shorter: from step {start} on replicas are assigned as before"
            return why, (Assignment(0, dict(assigned)), Assignment(start, dict(former)))
        self._speeds.fade(assigned, now)
        seconds = self._trial.round(now)
        if seconds is None or not self._speeds.known(assigned):
            return None
        assignments = following_assignments(assigned, workers, replicas, furthest, self._speeds, seconds)
        if len(assignments) == 1:
            return None
        self._trial.begin(assigned, seconds, start)
        shares = ", ".join(f"{worker} {len(own)}" for worker, own in sorted(assignments[-1].replicas.items()))
        why = f"workers are not equally fast: from step {start} on replicas are assigned by speed ({shares})"
        return why, assignments

    def straggler(
        self, assigned: Assigned, furthest: int, workers: Sequence[str], now: float
    ) -> tuple[str, int, int] | None:
        """(idle worker, step, replica): a replica of the `furthest` step that is late, and who could compute it too."""
        return self._speeds.straggler(assigned, furthest, workers, now)
