"""Follows an operator's orders that change the next view."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect
from rallypoint.core.cluster.events import Paused, Resized
from rallypoint.core.cluster.ordering.pause import pause
from rallypoint.core.cluster.succession import Succession


@dataclass(slots=True)
class Ordering:
    """Handles the events of orders."""

    course: Course
    succession: Succession

    def handle(self, event: Resized | Paused) -> list[Effect]:
        """Take one event; return the effects."""
        match event:
            case Resized(workers=workers):
                self.course.workers_max = max(1, workers)
                self.course.changed()
                return self.succession.advance()
            case Paused(on=on):
                return self.succession.advance() if pause(self.course, on=on) else []
