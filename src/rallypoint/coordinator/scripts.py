"""What the coordinator knows of the scripts in a job of sums: their progress, and which have ended."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rallypoint.coordinator.acts import Act
from rallypoint.coordinator.announcer import Announcer
from rallypoint.core.cluster.course import Course
from rallypoint.net.summing.messages import OfSums as OfSums
from rallypoint.net.summing.messages import ScriptEnded, Summed

Send = Callable[..., list[Act]]


class Scripts:
    """Takes what workers say of their sums. `send(message, *workers)` gives the acts that tell them."""

    def __init__(self, announcer: Announcer, send: Send) -> None:
        self._announcer, self._send = announcer, send
        self._ended: dict[str, ScriptEnded] = {}

    def take(self, worker: str, message: Summed | ScriptEnded, course: Course, now: float) -> list[Act]:
        """A worker with a part in the job has said this; return the acts to do."""
        if not course.has_a_part(worker):
            return []
        if isinstance(message, Summed):
            return self._announcer.summed(message, now)
        self._ended[worker] = told = msgspec.structs.replace(message, worker=worker)
        return self._send(told, *(other for other in sorted(course.members.workers) if other != worker))

    def again(self, worker: str) -> list[Act]:
        """The worker's connection is a new one: tell it what it may have missed."""
        return [act for other, told in self._ended.items() if other != worker for act in self._send(told, worker)]
