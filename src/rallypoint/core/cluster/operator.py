"""What an operator orders: a number of workers, and a pause.

A pause: no further step is computed until the operator lets the job go on.

It is a part of the view (`View.paused`), so it is in the journal before anybody acts on it, and outlives any process,
the coordinator too. What a step computes does not depend on it. A worker that hears of it late computes a step that
waits for the others; nothing is lost.
"""

from __future__ import annotations

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.events import Paused, Resized
from rallypoint.core.cluster.state import Phase


def may_pause(course: Course) -> str:
    """Why the job cannot be paused now, as a sentence; "" if it can."""
    if course.phase is not Phase.RUNNING or course.view is None or course.record is None or not course.begun:
        return "the job does not compute yet, or no more"
    if course.views.paused is not None:
        return f"the job is paused already, before step {course.record.steps_at(course.views.paused)}"
    return "the job is at its last step" if course.known + 1 >= course.last else ""


def follow(course: Course, event: Resized | Paused) -> bool:
    """Note an order for the next view. Returns False if it changes nothing."""
    match event:
        case Resized(workers=workers):
            course.workers_max = max(1, workers)
        case Paused(on=on):
            if on and may_pause(course):
                return False
            before, course.views.paused = course.views.paused, course.known + 1 if on else None
            if course.views.paused == before:
                return False
    course.changed()  # the next view may have to wait, as while servers are lost
    return True


def holds(course: Course) -> str:
    """A phrase for what training waits for while the job is paused; "" if it is not."""
    if course.views.paused is None or course.record is None:
        return ""
    return f"the operator, who has paused the job before step {course.record.steps_at(course.views.paused)}"
