"""Follows an operator's orders that change the next view."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect
from rallypoint.core.cluster.events import Paused, RateAwaited, Rescaled, Resized
from rallypoint.core.cluster.ordering.pause import pause
from rallypoint.core.cluster.ordering.rate import answered, may_rescale
from rallypoint.core.cluster.succession import Succession


@dataclass(slots=True)
class Ordering:
    """Handles the events of orders."""

    course: Course
    succession: Succession

    def handle(self, event: Resized | Paused | Rescaled | RateAwaited) -> list[Effect]:
        """Take one event; return the effects."""
        match event:
            case Resized(workers=workers):
                self.course.workers_max = max(1, workers)
                self.course.changed()
                return self.succession.advance()
            case Paused(on=on):
                return self.succession.advance() if pause(self.course, on=on) else []
            case Rescaled(factor=factor):
                if may_rescale(self.course, factor):
                    return []
                self.course.views.rescale = factor
                return self.succession.rescaled()
            case RateAwaited():
                said = answered(self.course, event)
                return [*self.succession.rescaled(), *said] if said else []
