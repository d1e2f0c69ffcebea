"""Checks that the workers' own optimizers have the same settings: each report carries a digest of them (AllReduce)."""

from __future__ import annotations

from rallypoint.core.view import ViewNumber
from rallypoint.net.messages import Report

_KEPT = 4  # steps: a report may arrive after another worker's report of the next step


class Agreement:
    """Compares the reports of each step, for the last few steps of the newest generation."""

    def __init__(self) -> None:
        self._generation = ViewNumber()
        self._first: dict[int, tuple[str, str]] = {}  # step -> the worker that reported it first, its digest

    def difference(self, worker: str, report: Report, *, own_loop: bool = False) -> str | None:
        """The sentence that says which workers had different settings at the report's step; None if all agree.

        `own_loop`: the loop is the script's (`rp.wrap`), so what to do is another thing.
        """
        if not report.settings or report.generation < self._generation:
            return None
        if report.generation > self._generation:
            self._generation = report.generation
            self._first.clear()
        other, settings = self._first.setdefault(report.step, (worker, report.settings))
        for old in sorted(self._first)[:-_KEPT]:
            del self._first[old]
        if settings == report.settings:
            return None
        who = f"{worker} and {other} do" if other != worker else f"two replicas on {worker} do"
        if own_loop:
            return (
                f"{who} not have the same learning rate, or another setting of their optimizers, by step "
                f"{report.step}, so their models would no longer be the same. A scheduler begins anew in a process "
                "that is started again: give it to rp.wrap(model, optimizer, schedule=scheduler, ...), which steps it "
                "up to the job's step; or set the rate from the step: group[\"lr\"] = rate(optimizer.position)"
            )
        return (
            f"{who} not have the same settings in own_optimizer or own_schedule by step {report.step}, so the workers' "
            "models would no longer be the same. What run.every calls runs on one worker alone, and the loop only "
            "where there are replicas to compute: change settings by own_schedule, or in the optimizer's own step()"
        )
