"""What the whole job waits for, as a phrase (I8)."""

from __future__ import annotations

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.evaluations import awaits_evaluation, holds_back
from rallypoint.core.cluster.operator import holds
from rallypoint.core.cluster.state import Phase, awaited
from rallypoint.core.cluster.storing.snapshots import Snapshots


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
