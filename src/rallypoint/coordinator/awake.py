"""The time without pauses of this process."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.coordinator.owner import TICKS

_LATE_TICK = 2  # time between two ticks beyond so many tick intervals was a pause of this process


@dataclass(slots=True)
class AwakeTime:
    """Counts seconds, without the pauses of this process (stopped, or a slow disk): nobody is silent in those.

    It begins at `seconds`, and was looked at last at the time `looked_at`. Members beat every `heartbeat` seconds.
    """

    seconds: float
    looked_at: float
    heartbeat: float

    def at(self, now: float) -> float:
        """What it shows at the time `now`. Ask often: what is longer than usual counts as a pause."""
        self.seconds += min(now - self.looked_at, _LATE_TICK * self.heartbeat / TICKS)
        self.looked_at = now
        return self.seconds
