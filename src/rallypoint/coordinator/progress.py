"""From replicas' reports to steps: a step is done when enough have reported, its loss is their weighted mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from rallypoint.core.view import ViewNumber
from rallypoint.net.messages import Report, StepDone


class StepTally:
    """Collects reports; repeats of a (step, replica) are ignored (I2). `enough` is R, or a quorum.

    A report belongs to a past (`Report.generation`), and counts unless that is void.
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
            if old != report.step:
                del self._reports[old]
        del self._reports[report.step]
        weight = sum(r.weight for r in reports.values())
        loss = sum(reports[replica].loss * reports[replica].weight for replica in sorted(reports)) / weight
        return StepDone(report.step, loss, sum(r.items for r in reports.values()), self.again)

    def counts(self, generation: ViewNumber) -> bool:
        """Does what is reported of that past count?"""
        return generation in self._generations

    def rewind(self, done: int, generation: ViewNumber) -> None:
        """The job goes on after step `done`: what was reported of later ones is void, and so are all earlier pasts."""
        self.done, self._generations = done, {generation}
        self._reports.clear()

    def hand_over(self, generation: ViewNumber) -> None:
        """All begin again from what one of them has come to: what is on its way of the steps before it holds."""
        self._generations.add(generation)

    def missing(self) -> tuple[int, list[int]]:
        """The step in progress and the replicas that have not reported it."""
        step = max(self.done + 1, *self._reports) if self._reports else self.done + 1
        return step, [r for r in range(self._replicas) if r not in self._reports.get(step, {})]


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
