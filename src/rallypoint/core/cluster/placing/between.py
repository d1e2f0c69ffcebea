"""What follows for the next view from what workers say of the versions that they hold: see `placing.handover`."""

from __future__ import annotations

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.state import Phase
from rallypoint.core.view import View


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
    computing = _computing(course, view)
    if view.ending or stuck or not computing or course.handover.hurries(view, course.members.leaving, course.now):
        return None
    return course.handover.before(view, course.known, computing, _ends(course), course.now)


def settled(course: Course) -> bool:
    """True if no update can be on its way: the primary and the backup of each shard are at the same version, or will
    be when the backup has got what was sent to it."""
    view = course.view
    if view is None or course.record is None or not course.strategies.hands_over or not course.begun:
        return False
    computing = _computing(course, view)
    return view.ending or not computing or course.handover.all_there(view, computing, _ends(course))


def _computing(course: Course, view: View) -> list[str]:
    """The workers that compute the next step."""
    here = course.members.workers
    return [worker for worker, own in view.assigned(course.known + 1).items() if own and worker in here]


def _ends(course: Course) -> tuple[int | None, int | None]:
    """Steps that will not be computed for now: a pause, the job's end."""
    return course.views.paused, course.last
