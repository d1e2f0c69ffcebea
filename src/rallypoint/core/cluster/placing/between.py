"""What follows for the next view from what workers say of the versions that they hold: see `placing.handover`."""

from __future__ import annotations

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.state import Phase


def ready(course: Course) -> tuple[list[str], list[str]]:
    """The active workers that compute, and those that fetch a version first."""
    view, active = course.view, course.active()
    if view is None or course.phase is not Phase.RUNNING or not course.strategies.warms:
        return active, []
    if course.storing_first_weights:
        return active, []
    cold = course.handover.cold(active, view.assigned(course.furthest + 1), course.known)
    left = set(cold)
    return [worker for worker in active if worker not in left] if cold else active, cold


def moves_before(course: Course) -> int | None:
    """The step before which shards that have caught up change their primaries; None: they do now."""
    view = course.view
    if view is None or course.record is None or not course.strategies.hands_over or not course.begun:
        return None
    stuck = not course.members.apart.isdisjoint(view.primary.values())  # no step ends before these shards move
    here = course.members.workers
    computing = [worker for worker, own in view.assigned(course.known + 1).items() if own and worker in here]
    if view.ending or stuck or not computing or course.handover.hurries(view, course.members.leaving, course.now):
        return None
    return course.handover.before(view, course.known, computing, (course.views.paused, course.last), course.now)
