"""What audits of servers lead to: a server that has found its own state changed, and two servers that differ.

A server that finds a change in its own memory is wrong, whatever others hold: it is given up, as if it had died, and
comes back as somebody new. When a primary and its backup hold other bytes after the same updates, one of them is wrong,
and two opinions do not say which. A third one is asked, by `audit_action`:

    tell    nobody: the primary's word counts, the backup is given up
    stop    nobody: the job ends
    drain   all of them: the job goes back to the last snapshot, from where the same steps give the same bytes. When a
            server is in a second dispute, with another server than in the first, it is the odd one out: it is given up,
            and holds no shards any more. When the same two differ for the second time, the job ends.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Abort, Effect, Refuse, ServerMismatch
from rallypoint.core.cluster.events import Disproved, StateChanged
from rallypoint.core.cluster.health.apart import disproved
from rallypoint.core.cluster.state import Phase

Left = Callable[[str, str], list[Effect]]


def state_changed(event: StateChanged, course: Course, left: Left) -> list[Effect]:
    """Give up a server whose memory has changed. It may come back; after a second time it is to hold no shards."""
    id = event.server
    if course.phase is not Phase.RUNNING or not course.is_current(event.generation) or id not in course.members.servers:
        return []
    why = (
        f"shard {event.shard} at version {event.version} has changed in the memory of {_on_host(id, course)} since the "
        "update that made it; nothing was computed from it"
    )
    found = ServerMismatch(why, event.shard, event.version, (id,))
    if _action(course) == "stop":
        return [found, *course.end(Abort(f"{why}; audit_action is 'stop'"))]
    if id in course.suspects.changed:
        course.members.apart.add(id)
        why += "; it is the second time, so this server is to hold no shards: test that machine's memory"
    course.suspects.changed.add(id)
    return [found, Refuse(id, f"given up: {why}"), *left(id, why)]


def disputed(event: Disproved, course: Course, left: Left, recover: Callable[[str], list[Effect]]) -> list[Effect]:
    """A primary and its backup hold other bytes. `recover(why)` goes back to the last snapshot.

    Without audits, and with "tell", the primary's word counts.
    """
    view = course.view
    if course.record is None or not course.record.audits_servers or view is None:
        return disproved(event, course, left)
    a, b, shard = event.server, view.beside(event.shard, event.paired), event.shard
    stale = view.primary.get(shard) != a or b not in course.members.servers
    if course.phase is not Phase.RUNNING or stale:
        return []
    what = (
        f"{_on_host(a, course)} and its backup {_on_host(b, course)} hold other bytes of shard {shard} at version "
        f"{event.version} after the same updates"
    )
    found = ServerMismatch(what, shard, event.version, (a, b))
    match _action(course):
        case "tell":
            return [found, *disproved(event, course, left)]
        case "stop":
            return [found, *course.end(Abort(f"{what}; audit_action is 'stop'"))]
        case _:
            return [found, *_third_opinion(a, b, what, course, left, recover)]


def _third_opinion(
    a: str, b: str, what: str, course: Course, left: Left, recover: Callable[[str], list[Effect]]
) -> list[Effect]:
    before = course.suspects.differed
    odd = [id for id, other in ((a, b), (b, a)) if id in before and before[id] != other]
    if len(odd) == 1:
        why = f"{what}, and it differed from {before[odd[0]]} earlier: test that machine"
        course.members.apart.add(odd[0])
        return [Refuse(odd[0], f"given up: {why}"), *left(odd[0], why)]
    if before.get(a) == b or not course.terms.snapshots:
        why = "for the second time" if before.get(a) == b else "and there are no snapshots to go back to"
        return course.end(Abort(
            f"{what}, {why}: one of the two machines computes wrong; test them (memory first), or use others"
        ))  # fmt: skip
    before[a], before[b] = b, a
    return recover(f"{what}: which of them is right is not certain, so the job goes back to the last snapshot")


def _action(course: Course) -> str:
    return "drain" if course.record is None else course.record.audit_action


def _on_host(id: str, course: Course) -> str:
    server = course.members.servers.get(id)
    return id if server is None else f"{id} on {server.host}"
