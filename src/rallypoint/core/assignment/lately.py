"""Until when a worker may contribute what was assigned to it earlier, and is somebody else's by now."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.view import View

LATE = 8  # steps: so late a report of a replica that its worker has no more is still believed
_STEADY = 10.0  # heartbeats after which a coordinator that took over knows which step is in progress
_NEVER = 1 << 62


@dataclass(slots=True)
class Lately:
    """Attributes:
    until: the step until which anything counts that was assigned before the newest assignment.
    """

    until: int = _NEVER
    _steady: float = 0.0  # the time (s) from which on the step in progress is known

    def begins(self, now: float, heartbeat: float) -> None:
        """A coordinator begins at time `now` (s). Who takes over has to hear the step in progress: it has a
        `heartbeat`, and others have 0."""
        self._steady = now + _STEADY * heartbeat

    def published(self, view: View, before: View | None, known: int, now: float) -> None:
        """`view` follows `before`, at time `now` (s), while `known` is the highest step that is known to be reached."""
        if before is None or (view.contributors, view.assignments) != (before.contributors, before.assignments):
            last = view.assignments[-1].start if view.assignments else 0
            self.until = max(known, last) if now >= self._steady else _NEVER

    def over(self, applied: int) -> bool:
        """True if no server takes a contribution any more that was assigned before the newest assignment, as `applied`
        is the highest step that a server has applied: the other shards are at most one step behind it."""
        return applied > self.until + LATE
