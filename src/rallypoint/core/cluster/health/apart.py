"""Sets members apart that hold the job up (`reach.py` finds them), lets them take part again, refuses others."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Abort, Effect, Refuse, Say
from rallypoint.core.cluster.events import Disproved
from rallypoint.core.cluster.health.reach import Reach
from rallypoint.core.cluster.state import Phase


def set_apart(reach: Reach, course: Course, left: Callable[[str, str], list[Effect]]) -> list[Effect]:
    """Set members apart that hold the job up; let those take part again that nobody has missed for long.

    A worker is given up and stands by when it comes back. A server keeps what it holds, and is to hold no shards.
    `left(member, why)` is what happens when a member is gone. The caller publishes the view that follows, if anything
    is returned.
    """
    effects: list[Effect] = []
    for case in reach.look():
        if course.phase is not Phase.RUNNING:
            break  # the loss of the member before has ended the job, or lost its state
        again = case.member in course.members.apart
        course.members.apart.add(case.member)
        if again or case.member in course.members.workers or course.recovery.workers_store:
            effects.append(Refuse(case.member, f"given up: {case.why}"))
            effects += left(case.member, case.why)
        else:
            effects.append(Say(f"{case.member} is to hold no shards for now: {case.why}"))
    returned = reach.sound()
    course.members.apart.difference_update(returned)
    return effects + [Say(f"{id} takes part again") for id in returned if id in course.members]


def disproved(event: Disproved, course: Course, left: Callable[[str, str], list[Effect]]) -> list[Effect]:
    """Give up a backup that does not hold what it has acknowledged, and let it hold nothing if it comes back.

    Believed only of the shard's primary, and of the pair that the view in force names.
    """
    view = course.view
    if view is None or course.phase is not Phase.RUNNING or view.primary.get(event.shard) != event.server:
        return []
    backup = view.beside(event.shard, event.paired)
    if backup not in course.members.servers:
        return []
    why = (
        f"it acknowledged version {event.version} of shard {event.shard}, and does not hold what {event.server} sent "
        "it: it is not what it says it is, or one of the two machines computes wrong; test the memory of both"
    )
    course.members.apart.add(backup)
    return [Refuse(backup, f"given up: {why}"), *left(backup, why)]


def disagrees(worker: str, why: str, course: Course) -> list[Effect]:
    """Refuse a worker that has proposed another record; `why` is a phrase. Before the job begins, end the job."""
    members = course.members
    host = members.workers[worker].host
    other = min(members.proposed, default="the job")
    sentence = f"{worker} on {host} brought {why} ({worker} is here, {other} is there)"
    if course.phase is Phase.GATHERING:
        return course.end(Abort(sentence))
    members.remove(worker)  # a worker that joins late must not end a job that runs without it
    return [Refuse(worker, sentence, final=True), Say(f"refused: {sentence}")]
