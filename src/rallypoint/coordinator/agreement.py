"""Are the workers' own optimizers set alike? Each report carries a digest of them, to be compared by step."""

from __future__ import annotations

from rallypoint.core.view import ViewNumber
from rallypoint.net.messages import Report


class Agreement:
    """Compares what workers report of one step; keeps the newest step only."""

    def __init__(self) -> None:
        self._at: tuple[ViewNumber, int] = (ViewNumber(), -1)
        self._first = ("", "")  # worker, digest

    def difference(self, worker: str, report: Report) -> str | None:
        """A sentence when this report's step was computed with other settings elsewhere; None when all agree."""
        at = (report.generation, report.step)
        if not report.settings or at < self._at:
            return None
        if at > self._at:
            self._at, self._first = at, (worker, report.settings)
        other, settings = self._first
        if settings == report.settings:
            return None
        who = f"{worker} and {other} do" if other != worker else f"two replicas on {worker} do"
        return (
            f"{who} not have the same settings in own_optimizer or own_schedule by step {report.step}, so the workers' "
            "models would no longer be the same. What run.every calls runs on one worker alone, and the loop only "
            "where there are replicas to compute: change settings by own_schedule, or in the optimizer's own step()"
        )
