"""Counts replicas' reports: a step is done when enough replicas have reported; its loss is their weighted mean.

Keeps the metrics of evaluations by step of training: a snapshot's manifest gets those of its step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from rallypoint.config import JobConfig
from rallypoint.coordinator.acts import AddFigures
from rallypoint.core.cluster.course import Course
from rallypoint.core.modes import Pace
from rallypoint.core.protocol import Report, StepDone
from rallypoint.core.typed import MOST_MEMBERS, MOST_METRICS
from rallypoint.core.view import ViewNumber


class StepTally:
    """The tally of jobs with rounds, in which no replica begins a step before the previous one is complete.

    It counts each (step, replica) once (I2) and no report of a stale generation. `enough` reports complete a step: R
    (`replicas`) by default, or a quorum.

    Attributes:
        done: the last complete step; -1 before the first.
        again: how many reports were of replicas that were computed again.
    """

    def __init__(self, replicas: int, enough: int | None = None) -> None:
        self._replicas = replicas
        self._enough = replicas if enough is None else enough
        self._reports: dict[int, dict[int, Report]] = {}
        self._generations = {ViewNumber()}
        self.done = -1
        self.again = 0

    def add(self, report: Report) -> StepDone | None:
        """Count a report. Returns the step if this report completes it, else None."""
        if not 0 <= report.replica < self._replicas or not self.counts(report.generation):
            return None
        reports = self._reports.setdefault(report.step, {}) if report.step > self.done else {}
        if report.step <= self.done and self._enough < self._replicas:
            return None  # the quorum was complete without it
        if report.step <= self.done or report.replica in reports:
            self.again += not report.repeated
            return None
        reports[report.replica] = report
        if len(reports) < self._enough:
            return None
        self.done = report.step
        for old in [step for step in self._reports if step <= self.done]:
            del self._reports[old]
        weight = sum(r.weight for r in reports.values())
        loss = sum(reports[replica].loss * reports[replica].weight for replica in sorted(reports)) / weight
        items, figures = sum(r.items for r in reports.values()), _figures(list(reports.values()))
        computed = round(max(r.seconds for r in reports.values()), 4)
        return StepDone(report.step, loss, items, self.again, figures=figures, computed=computed)

    def counts(self, generation: ViewNumber) -> bool:
        """True if a claim made in that generation counts."""
        return generation in self._generations

    def take_over(self, done: int, generation: ViewNumber) -> None:
        """Go on where an earlier coordinator ended. `done` is the highest step that it had reports of.

        That step may not be complete: its reports still count.
        """
        self.rewind(max(-1, done - 1), generation)

    def rewind(self, done: int, generation: ViewNumber) -> None:
        """Go on after step `done` in `generation`: drop all reports, and count none of earlier generations."""
        self.done, self._generations = done, {generation}
        self._reports.clear()

    def hand_over(self, generation: ViewNumber) -> None:
        """Go on in `generation`, which begins with a version that a worker has reached: earlier reports still count."""
        self._generations.add(generation)

    def missing(self) -> tuple[int, list[int]]:
        """The step that the job waits for, and the replicas that have not reported it.

        That is the highest step with a report: all steps before it were complete when it began.
        """
        step = max(self.done + 1, *self._reports) if self._reports else self.done + 1
        return step, [r for r in range(self._replicas) if r not in self._reports.get(step, {})]


class StreamTally(StepTally):
    """The tally of streaming jobs, in which each replica has a clock of its own.

    The job waits for the replicas with the lowest clock. A replica ahead of them is not late, also if it does not
    report: under SSP it may have to wait for them.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._clocks: dict[int, int] = {}  # replica -> the step after the last one that it reported

    def add(self, report: Report) -> StepDone | None:
        if 0 <= report.replica < self._replicas and self.counts(report.generation):
            self._clocks[report.replica] = max(self._clocks.get(report.replica, 0), report.step + 1)
        return super().add(report)

    def take_over(self, done: int, generation: ViewNumber) -> None:
        """Go on where an earlier coordinator ended. Replicas may be at any step up to `done`: all reports count."""
        self.rewind(-1, generation)

    def rewind(self, done: int, generation: ViewNumber) -> None:
        super().rewind(done, generation)
        self._clocks.clear()

    def missing(self) -> tuple[int, list[int]]:
        """The lowest clock and the replicas at it; if some replicas have not reported at all, those."""
        unheard = [replica for replica in range(self._replicas) if replica not in self._clocks]
        step = max(self.done + 1, min(self._clocks.values(), default=0))
        if unheard:
            return step, unheard
        return step, [replica for replica, clock in sorted(self._clocks.items()) if clock <= step]


def tally_for(config: JobConfig) -> StepTally:
    match config.mode.pace:
        case Pace.ROUNDS:
            return StepTally(config.replicas, config.quorum)
        case Pace.OWN:
            return StreamTally(config.replicas)


def items_of_step(config: JobConfig) -> int:
    """The items (samples, tokens) that all replicas together use in one step of training (I1)."""
    return (
        config.replicas if config.quorum is None else config.quorum
    ) * config.batch * config.reading.items_per_sample


_REMEMBERED = 256


class Lateness:
    """Seconds between a step's first contribution and each worker's last one, over the last 256 steps."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}

    def add(self, late: Mapping[str, float]) -> None:
        """Add one step: worker -> seconds."""
        for worker, seconds in late.items():
            if worker not in self._seconds and len(self._seconds) >= MOST_MEMBERS:
                continue  # a server has made names up
            self._seconds.setdefault(worker, deque(maxlen=_REMEMBERED)).append(seconds)

    def of(self, worker: str) -> str:
        """A phrase with a worker's p50 and p99 lateness; "" when there are no figures."""
        ordered = sorted(self._seconds.get(worker, ()))
        if not ordered:
            return ""
        p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        steps = f"{len(ordered)} step{'s' * (len(ordered) != 1)}"
        return f"usually {p50:.2f} s behind the first, at worst {p99:.2f} s (p50 and p99 of {steps})"


EVALUATED = 64  # versions


class EvaluationMetrics:
    """Metrics by step of training. It merges several evaluations of a step, and keeps the newest 64 steps."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[str, float]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Add the metrics of one evaluation of `step`. Returns all metrics of that step."""
        known = self._by_step.setdefault(step, {})
        for name, value in values.items():
            if name in known or len(known) < MOST_METRICS:
                known[name] = value
        while len(self._by_step) > EVALUATED:
            del self._by_step[min(self._by_step)]
        return dict(known)

    def of(self, step: int) -> dict[str, float]:
        return dict(self._by_step.get(step, {}))

    def judged(self, course: Course) -> list[AddFigures]:
        """What an earlier coordinator may not have added any more to the snapshot of the best version."""
        best, record = course.evaluations.decided.best, course.record
        if best is None or record is None or best.version not in course.evaluations.results:
            return []
        step = record.steps_at(best.version)
        return [AddFigures(step, self.of(step), best.version)]

    def rewind(self, step: int) -> None:
        """Drop the metrics of steps after `step`: the job goes back to it."""
        self._by_step = {known: values for known, values in self._by_step.items() if known <= step}


def agree(known: Mapping[str, float], values: Mapping[str, float]) -> bool:
    """True if all these figures are known, with these values."""
    return all(name in known and _same(known[name], values[name]) for name in values)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _figures(reports: Sequence[Report]) -> dict[str, float]:
    """What scripts have logged: the mean over the replicas that have logged it, by their weights."""
    found: dict[str, float] = {}
    for name in sorted({name for report in reports for name in report.figures}):
        values = [(report.weight, report.figures[name]) for report in reports if name in report.figures]
        found[name] = sum(w * v for w, v in values) / sum(w for w, _ in values)  # (fsum raises where infinities meet)
    return found
