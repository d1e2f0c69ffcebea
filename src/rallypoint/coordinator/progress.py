"""From replicas' reports to steps: a step is done when all R have reported, its loss is their weighted mean."""

from __future__ import annotations

from rallypoint.net.messages import Report, StepDone


class StepTally:
    """Collects reports; repeats of a (step, replica) are ignored (I2)."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._reports: dict[int, dict[int, Report]] = {}
        self.done = -1

    def add(self, report: Report) -> StepDone | None:
        """The step that this report completes, if it does."""
        if report.step <= self.done or not 0 <= report.replica < self._replicas:
            return None
        reports = self._reports.setdefault(report.step, {})
        reports.setdefault(report.replica, report)
        if len(reports) < self._replicas:
            return None
        self.done = report.step
        for old in [step for step in self._reports if step <= self.done]:
            if old != report.step:
                del self._reports[old]
        del self._reports[report.step]
        weight = sum(r.weight for r in reports.values())
        loss = sum(reports[replica].loss * reports[replica].weight for replica in sorted(reports)) / weight
        return StepDone(report.step, loss, sum(r.items for r in reports.values()))

    def missing(self) -> tuple[int, list[int]]:
        """The step in progress and the replicas that have not reported it."""
        step = self.done + 1
        return step, [r for r in range(self._replicas) if r not in self._reports.get(step, {})]
