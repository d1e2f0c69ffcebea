"""From replicas' reports to steps: a step is done when enough have reported; its loss is their weighted mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from rallypoint.config import JobConfig
from rallypoint.core.modes import Pace
from rallypoint.core.view import ViewNumber
from rallypoint.net.messages import Report, StepDone


class StepTally:
    """Counts each (step, replica) once (I2). `enough` reports complete a step: R of them, or a quorum.

    A report of a stale generation does not count. This is the tally of jobs with rounds: nobody begins a step before
    the one before it is complete.
    """

    def __init__(self, replicas: int, enough: int | None = None) -> None:
        self._replicas = replicas
        self._enough = replicas if enough is None else enough
        self._reports: dict[int, dict[int, Report]] = {}
        self._generations = {ViewNumber()}
        self.done = -1
        self.again = 0

    def add(self, report: Report) -> StepDone | None:
        """The step that this report completes, if it does."""
        if not 0 <= report.replica < self._replicas or not self.counts(report.generation):
            return None
        reports = self._reports.setdefault(report.step, {}) if report.step > self.done else {}
        if report.step <= self.done and self._enough < self._replicas:
            return None  # it was not waited for
        if report.step <= self.done or report.replica in reports:
            self.again += 1
            return None
        reports[report.replica] = report
        if len(reports) < self._enough:
            return None
        self.done = report.step
        for old in [step for step in self._reports if step <= self.done]:
            del self._reports[old]
        weight = sum(r.weight for r in reports.values())
        loss = sum(reports[replica].loss * reports[replica].weight for replica in sorted(reports)) / weight
        return StepDone(report.step, loss, sum(r.items for r in reports.values()), self.again)

    def counts(self, generation: ViewNumber) -> bool:
        """Does a claim made in that generation count?"""
        return generation in self._generations

    def take_over(self, done: int, generation: ViewNumber) -> None:
        """Go on where an earlier coordinator ended: it knew of reports of step `done` at most.

        That step may not be complete: reports of it may still come.
        """
        self.rewind(max(-1, done - 1), generation)

    def rewind(self, done: int, generation: ViewNumber) -> None:
        """The job goes on after step `done`: reports of later steps, and of earlier generations, are stale."""
        self.done, self._generations = done, {generation}
        self._reports.clear()

    def hand_over(self, generation: ViewNumber) -> None:
        """A generation begins from what one worker has reached: reports of the steps before it still count."""
        self._generations.add(generation)

    def missing(self) -> tuple[int, list[int]]:
        """The step that is waited for, and the replicas that have not reported it.

        The furthest step that anybody reported: nobody could begin it before all others were complete.
        """
        step = max(self.done + 1, *self._reports) if self._reports else self.done + 1
        return step, [r for r in range(self._replicas) if r not in self._reports.get(step, {})]


class StreamTally(StepTally):
    """The tally of streaming jobs: each replica has a clock of its own, and some are steps ahead of others.

    The slowest replicas are waited for. Those ahead of them are not late: they may only wait (SSP).
    """

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._clocks: dict[int, int] = {}  # of each replica: the step after the last that it reported

    def add(self, report: Report) -> StepDone | None:
        if 0 <= report.replica < self._replicas and self.counts(report.generation):
            self._clocks[report.replica] = max(self._clocks.get(report.replica, 0), report.step + 1)
        return super().add(report)

    def take_over(self, done: int, generation: ViewNumber) -> None:
        """Only the furthest replica's step is known: others may be at any step before it."""
        self.rewind(-1, generation)

    def rewind(self, done: int, generation: ViewNumber) -> None:
        super().rewind(done, generation)
        self._clocks.clear()

    def missing(self) -> tuple[int, list[int]]:
        """The lowest clock and the replicas at it; those that have not reported yet before all others."""
        unheard = [replica for replica in range(self._replicas) if replica not in self._clocks]
        step = max(self.done + 1, min(self._clocks.values(), default=0))
        if unheard:
            return step, unheard
        return step, [replica for replica, clock in sorted(self._clocks.items()) if clock <= step]


def tally_for(config: JobConfig) -> StepTally:
    """The tally of a job with these settings."""
    match config.mode.pace:
        case Pace.ROUNDS:
            return StepTally(config.replicas, config.quorum)
        case Pace.OWN:
            return StreamTally(config.replicas)


def items_of_step(config: JobConfig) -> int:
    """Items (samples, tokens) that one step of training uses, of all replicas together (I1)."""
    return (config.replicas if config.quorum is None else config.quorum) * config.batch * config.items_per_sample


_REMEMBERED = 256


class Lateness:
    """How long after the first contribution of a step each worker's last one came, over the last steps."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}

    def add(self, late: Mapping[str, float]) -> None:
        """One step's: worker -> seconds."""
        for worker, seconds in late.items():
            self._seconds.setdefault(worker, deque(maxlen=_REMEMBERED)).append(seconds)

    def of(self, worker: str) -> str:
        """A worker's figures as a phrase; "" when there are none."""
        ordered = sorted(self._seconds.get(worker, ()))
        if not ordered:
            return ""
        p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return f"usually {p50:.2f} s behind the first, at worst {p99:.2f} s (p50 and p99 of {len(ordered)} steps)"
