"""What must be true of the coordinator's machine after every event."""

from __future__ import annotations

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.state import Phase
from rallypoint.core.view import View


def check_course(course: Course, before: View | None) -> None:
    """Raise AssertionError with a sentence if an invariant does not hold; `before`: the view at the last check."""
    _check_members(course)
    assert (course.phase is Phase.OVER) == (course.last_word is not None), f"{course.phase}, {course.last_word}"
    if course.view is None:
        assert course.phase is not Phase.RUNNING, "the job runs without a view"
        return
    _check_beginning(course, course.view, before)
    if course.record is not None:
        _check_view(course.view, course.replicas, {shard.index for shard in course.record.layout.shards})
    _check_order(course.view, before)
    strange = course.views.caught_up - course.view.backup.keys()
    assert not strange, f"shards {sorted(strange)} have caught up, and no backup"
    strange = course.views.arrived - course.view.incoming.keys()
    assert not strange, f"shards {sorted(strange)} have caught up on a third server, and have none"
    if course.phase is Phase.RUNNING:
        _check_presence(course, course.view)


def _check_members(course: Course) -> None:
    members = course.members
    twice = [id for id in set(members.everybody) if members.everybody.count(id) > 1]
    assert not twice, f"{sorted(twice)} have two roles"
    gone = members.leaving - members.workers.keys() - members.servers.keys()
    assert not gone, f"{sorted(gone)} are leaving, and no members"
    for name, ids in (("proposed", members.proposed.keys()), ("done", members.done)):
        gone = set(ids) - members.workers.keys()
        assert not gone, f"{sorted(gone)} are {name}, and no workers"
    missing = members.awaited - set(members.everybody)
    assert not missing, f"{sorted(missing)} are awaited, and no members"


def _check_beginning(course: Course, view: View, before: View | None) -> None:
    """First weights are uploaded only while the job has not begun: else what was computed is lost without a word."""
    known = before is not None and before.generation == view.generation
    if known or view.generation.epoch < course.views.epoch or course.recovery.workers_store or view.origin:
        return
    what = f"view {view.number} begins with first weights of {view.uploader}"
    assert not course.begun, f"{what}, and the job has begun"


def _check_order(view: View, before: View | None) -> None:
    assert view.generation <= view.number, f"view {view.number} is older than its generation {view.generation}"
    if before is None or before is view:
        return
    assert view.number > before.number, f"view {view.number} follows {before.number}"
    assert view.generation >= before.generation, f"generation {view.generation} follows {before.generation}"


def _check_view(view: View, replicas: int, shards: set[int]) -> None:
    for assignment in view.assignments:
        assigned = sorted(replica for own in assignment.replicas.values() for replica in own)
        assert assigned == list(range(replicas)), f"view {view.number} assigns {assigned} of {replicas} replicas"
    starts = [assignment.start for assignment in view.assignments]
    assert starts == sorted(starts), f"view {view.number} assigns from steps {starts}"
    used = set(view.aggregator_of.values()) - {member.id for member in view.aggregators}
    assert not used, f"view {view.number} gives workers to {sorted(used)}, who are not in it"
    servers = {member.id for member in view.servers}
    assert view.primary.keys() == shards, f"view {view.number} has primaries of {sorted(view.primary)}"
    assert view.paired.keys() == view.backup.keys(), f"view {view.number} pairs {sorted(view.paired)}"
    for shard, home in view.primary.items():
        backup = view.backup.get(shard)
        assert home in servers, f"the primary of shard {shard} is {home}, who is not in view {view.number}"
        assert backup is None or backup in servers, f"the backup of shard {shard} is {backup}, who is not in the view"
        assert backup != home, f"the primary and the backup of shard {shard} are both {home}"
    for shard, third in view.incoming.items():
        assert third.server in servers, f"shard {shard} goes to {third.server}, who is not in view {view.number}"
        assert view.backup.get(shard), f"shard {shard} goes to {third.server} beside no backup"
        twice = third.server in (view.primary[shard], view.backup[shard])
        assert not twice, f"shard {shard} goes to {third.server}, who has it"


def _check_presence(course: Course, view: View) -> None:
    here = course.members
    for member in view.servers:
        homes = [shard for shard, home in view.primary.items() if home == member.id]
        present = here.servers.get(member.id) == member
        assert present or not homes, f"{member.id} is gone, and the primary of shards {homes} in view {view.number}"
    for worker, own in view.assigned(course.furthest + 1).items():
        assert not own or worker in here.workers, f"{worker} is gone, and has replicas {own} in view {view.number}"
