"""How one view follows another when members come and go: who holds which shard, and who computes which replica.

A *home* is the server that holds a shard as its primary. `servers` are those that are here now, by id; a server of the
view that is not among them, or has another incarnation, holds nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from rallypoint.core.assignment.speeds import Speeds
from rallypoint.core.layout import Shard
from rallypoint.core.placement import place, place_backups
from rallypoint.core.view import Assignment, Member, View, ViewNumber, assign_replicas, reassign_orphans

AHEAD = 2  # steps after the furthest one seen from which a new assignment counts, so that nobody computes in vain
_WORTH_IT = 1.1  # times as long as under a fair assignment that a step may take before replicas move


# ---- shards ----------------------------------------------------------------------------------------------------


def first_homes(
    shards: Sequence[Shard], servers: Mapping[str, Member], replication: int
) -> tuple[dict[int, str], dict[int, str]]:
    """Primary and backup of every shard where nobody holds anything yet. ValueError when there is no server."""
    primary = place(shards, sorted(servers))
    return primary, place_backups(shards, list(servers), primary, None, _hosts(servers)) if replication > 1 else {}


def surviving_primaries(
    view: View, servers: Mapping[str, Member], caught_up: AbstractSet[int]
) -> dict[int, str] | None:
    """A primary for every shard among those who hold what is needed; None when a shard is lost.

    The backup of a shard that is `caught_up` may be promoted.
    """
    alive = _alive(view, servers)
    primary: dict[int, str] = {}
    for shard, home in view.primary.items():
        if home not in alive:
            home = view.backup.get(shard, "") if shard in caught_up else ""
        if home not in alive:
            return None
        primary[shard] = home
    return primary


def rebalanced(
    view: View, primary: Mapping[int, str], shards: Sequence[Shard], servers: Mapping[str, Member],
    caught_up: AbstractSet[int], replication: int, staying: Mapping[str, Member] | None = None,
) -> tuple[dict[int, str], dict[int, str]]:  # fmt: skip
    """Primary and backup of every shard, moved towards an even load from `primary`, the homes that survive.

    All of them move to the servers that are `staying`; by default all `servers` are.

    A shard's new home is filled as its backup first. All that move are promoted together, once they have caught up.
    """
    alive = _alive(view, servers)
    homes = dict(primary)
    staying = servers if staying is None else staying
    kept = {s: b for s, b in view.backup.items() if b in alive and b in staying and b != homes[s]}
    wanted = place(shards, list(staying), homes)
    moving = {s for s, home in wanted.items() if home != homes[s]}
    if moving and all(kept.get(s) == wanted[s] and s in caught_up for s in moving):
        homes = {s: wanted[s] if s in moving else home for s, home in homes.items()}
        kept = {s: b for s, b in kept.items() if s not in moving}
        moving = set()
    kept |= {s: wanted[s] for s in moving}
    if replication < 2:
        return homes, {s: b for s, b in kept.items() if s in moving}
    backups = place_backups(shards, list(staying), homes, kept, _hosts(servers))
    return homes, backups | {s: wanted[s] for s in moving}  # also where one server stays, too few for backups


def still_caught_up(view: View, before: View, caught_up: AbstractSet[int]) -> set[int]:
    """Of the shards that have caught up, those with the same two processes in `view` as in the view before."""
    now, then = _pairs(view), _pairs(before)
    return {shard for shard in caught_up if now[shard] == then[shard]}


def pairings(view: View, before: View | None) -> dict[int, ViewNumber]:
    """Of each shard with a backup, the view in which these two processes became primary and backup: see
    `View.paired`."""
    if before is None:
        return dict.fromkeys(view.backup, view.number)
    now, then = _pairs(view), _pairs(before)
    return {s: before.paired[s] if now[s] == then[s] else view.number for s in view.backup}


def _alive(view: View, servers: Mapping[str, Member]) -> set[str]:
    incarnations = {member.id: member.incarnation for member in view.servers}
    return {id for id, member in servers.items() if incarnations.get(id) == member.incarnation}


def _pairs(view: View) -> dict[int, list[Member]]:
    """Every shard's primary and backup: the processes, not their names."""
    members = {member.id: member for member in view.servers}
    return {
        shard: [members[name] for name in (home, view.backup.get(shard)) if name in members]
        for shard, home in view.primary.items()
    }


def _hosts(servers: Mapping[str, Member]) -> dict[str, str]:
    return {id: member.host for id, member in servers.items()}


# ---- replicas --------------------------------------------------------------------------------------------------


def following_assignments(
    assigned: Mapping[str, tuple[int, ...]], workers: Sequence[str], replicas: int, furthest: int, speeds: Speeds,
    round: float = 0.0,
) -> tuple[Assignment, ...]:  # fmt: skip
    """Assign the replicas to `workers` (at least one), where `assigned` counts for the next step; {} if none
    does.

    Replicas of those who are gone go to others at once. If that is uneven for the workers' speeds, a fair one
    follows, which counts from a step a little ahead of the `furthest` one seen. If it is known what a `round` takes,
    in seconds, what it takes beside computing counts too: no assignment makes that shorter.
    """
    rates = speeds.rates(workers)
    fair = assign_replicas(replicas, sorted(workers), rates)
    if not assigned:
        return (Assignment(0, fair),)
    now = reassign_orphans(assigned, workers, rates)
    computing = speeds.makespan(now, rates)
    beside = max(0.0, round - computing)
    if computing + beside <= (speeds.makespan(fair, rates) + beside) * _WORTH_IT:
        return (Assignment(0, now),)
    return (Assignment(0, now), Assignment(furthest + AHEAD, fair))


# ---- news ------------------------------------------------------------------------------------------------------


def says_nothing_new(view: View, before: View, furthest: int) -> bool:
    """Does `view` differ from the one before in nothing but its number, and assignments that no longer count?"""
    pending = any(assignment.start > furthest + 1 for assignment in before.assignments)
    same_assignment = len(view.assignments) < 2 and not pending and view.assigned(0) == before.assigned(furthest + 1)
    assignments = before.assignments if same_assignment else view.assignments
    return msgspec.structs.replace(view, number=before.number, assignments=assignments) == before
