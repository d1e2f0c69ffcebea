"""What an operator orders: a number of workers, and a pause.

A pause: no further step is computed until the operator lets the job go on.

It is a part of the view (`orders.paused`), so it is in the journal before anybody acts on it, and outlives any process,
the coordinator too. What a step computes does not depend on it. A worker that hears of it late computes a step that
waits for the others; nothing is lost.
"""

from __future__ import annotations

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.evaluations import awaits_evaluation, holds_back
from rallypoint.core.cluster.state import Phase, awaited
from rallypoint.core.cluster.storing.snapshots import Snapshots
from rallypoint.core.protocol import Pause, Resize


def may_pause(course: Course) -> str:
    """Why the job cannot be paused now, as a sentence; "" if it can."""
    if course.phase is not Phase.RUNNING or course.view is None or course.record is None or not course.begun:
        return "the job does not compute yet, or no more"
    if course.views.orders.paused is not None:
        return f"the job is paused already, before step {course.record.steps_at(course.views.orders.paused)}"
    return "the job is at its last step" if course.known + 1 >= course.last else ""


def follow(course: Course, event: Resize | Pause) -> bool:
    """Note an order for the next view. Returns False if it changes nothing."""
    match event:
        case Resize(workers=workers):
            course.workers_max = max(1, workers)
        case Pause(on=on):
            if on and may_pause(course):
                return False
            before = course.views.orders
            course.views.order(paused=course.known + 1 if on else None)
            if course.views.orders == before:
                return False
    course.changed()  # the next view may have to wait, as while servers are lost
    return True


def holds(course: Course) -> str:
    """A phrase for what training waits for while the job is paused; "" if it is not."""
    if course.views.orders.paused is None or course.record is None:
        return ""
    return f"the operator, who has paused the job before step {course.record.steps_at(course.views.orders.paused)}"


# What the whole job waits for, as a phrase (I8).


def waiting_for(course: Course, snapshots: Snapshots, *, cut_off: bool) -> str | None:
    """The phrase; None when the job only waits for the step in progress. `cut_off`: no member is heard.

    Not for a job that is failing: that waits for its last snapshot.
    """
    if course.members.all_done and not snapshots.final:
        return snapshots.awaited_at_the_end
    if cut_off:
        return "members to be heard again (the coordinator presumes that it is cut off itself)"
    if course.phase is Phase.RECOVERING and (phrase := course.recovery.awaited(course.members, course.terms)):
        return phrase
    if course.members.all_done and (phrase := awaits_evaluation(course)):
        return phrase
    if course.phase is Phase.RUNNING and (phrase := holds(course) or holds_back(course) or _unmanned(course)):
        return phrase
    return awaited(
        course.phase, course.members, course.terms, workers=course.workers_to_begin, servers=course.servers_to_begin
    )


def _unmanned(course: Course) -> str:
    """Of a job whose replicas stay with their workers: the replicas that have none, as a phrase; "" if all have."""
    if not course.strategies.pinned or course.active():
        return ""
    gone = {r: worker for r, worker in sorted(course.pins.items()) if worker not in course.members.present}
    lost = ", ".join(f"replica {r} ({worker} had it)" for r, worker in gone.items())
    return f"a process for {lost}: its loop has its own batches, which no other can compute" if lost else ""
