"""What changes from one view to the next when members come and go: the homes of shards, the assignments of replicas.

A shard's *home* is its primary's server. `servers` are the servers that are here now, by id. A server of the view that
is not among them, or that has another incarnation, holds nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.assignment.speeds import Speeds
from rallypoint.core.layout import Shard
from rallypoint.core.placement import place, place_backups
from rallypoint.core.topology.weights import weights_of
from rallypoint.core.view import Assignment, Member, View, ViewNumber, assign_replicas, reassign_orphans, shares_of

AHEAD = 2  # a new assignment starts so many steps after the furthest one seen: no worker has begun that step yet
_WORTH_IT = 1.1  # replicas move if a step takes more than this times as long as with a fair assignment
_ROUNDED = 1 - 1e-9  # a bound that rounding cannot lift above what it bounds


# ---- shards ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placing:
    """How shards are placed.

    Attributes:
        homes, backups: a coordinator keeps their last answers (`Remembered`).
        staying: the servers on which shards may be; None: all.
        racks: see `weights_of`.
        hold: one of the servers may be dead. Nothing moves, because a backup that moves could be the last copy; only
            shards without a backup get one.
        stay: no shard changes its primary now, also if its new home has caught up.
    """

    homes: Callable[..., dict[int, str]] = place
    backups: Callable[..., dict[int, str]] = place_backups
    staying: Mapping[str, Member] | None = None
    racks: Mapping[str, float] = field(default_factory=dict)
    hold: bool = False
    stay: bool = False


def first_homes(
    shards: Sequence[Shard], servers: Mapping[str, Member], replication: int,
    speeds: Mapping[str, float] | None = None, racks: Mapping[str, float] | None = None,
) -> tuple[dict[int, str], dict[int, str]]:  # fmt: skip
    """Primary and backup of every shard at the start of a generation, when no server holds anything.

    `speeds`: see `View`; `racks`: see `weights_of`. Raises ValueError when there is no server.
    """
    weights = weights_of(servers, speeds or {}, racks)
    primary = place(shards, sorted(servers), weights=weights)
    return primary, _backups(Placing(), shards, servers, primary, {}, weights) if replication > 1 else {}


def surviving_primaries(
    view: View, servers: Mapping[str, Member], caught_up: AbstractSet[int]
) -> dict[int, str] | None:
    """A primary for every shard, among the servers that hold it; None when a shard is lost.

    The primary stays if its server is here. Else the backup becomes primary, if it has `caught_up`.
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
    caught_up: AbstractSet[int], replication: int, how: Placing = Placing(),
) -> tuple[dict[int, str], dict[int, str]]:  # fmt: skip
    """Primary and backup of every shard for an even load on the servers that stay, by default all `servers`.

    `primary` are the surviving homes. A shard moves in two views: its new home is its backup first, and becomes its
    primary when the backups of all moving shards have caught up. Links that are not alike, by what is told of
    servers and by `view.speeds`, get loads in proportion.
    """
    alive = _alive(view, servers)
    homes = dict(primary)
    staying = servers if how.staying is None else how.staying
    weights = weights_of(staying, view.speeds, how.racks)
    if how.hold:
        held = {s: b for s, b in view.backup.items() if b in alive and b != homes[s]}
        new = _backups(how, shards, staying, homes, held, weights) if replication >= 2 else {}
        return homes, new | held
    kept = {s: b for s, b in view.backup.items() if b in alive and b in staying and b != homes[s]}
    wanted = how.homes(shards, list(staying), homes, weights)
    moving = {s for s, home in wanted.items() if home != homes[s]}
    if moving and not how.stay and all(kept.get(s) == wanted[s] and s in caught_up for s in moving):
        homes = {s: wanted[s] if s in moving else home for s, home in homes.items()}
        kept = {s: b for s, b in kept.items() if s not in moving}
        moving = set()
    kept |= {s: wanted[s] for s in moving}
    if replication < 2:
        return homes, {s: b for s, b in kept.items() if s in moving}
    backups = _backups(how, shards, staying, homes, kept, weights)
    return homes, backups | {s: wanted[s] for s in moving}  # a moving shard needs its new home also if one server stays


def still_caught_up(view: View, before: View, caught_up: AbstractSet[int]) -> set[int]:
    """The shards of `caught_up` whose primary and backup are the same processes in `view` as in `before`."""
    now, then = _pairs(view), _pairs(before)
    return {shard for shard in caught_up if now[shard] == then[shard]}


def pairings(view: View, before: View | None) -> dict[int, ViewNumber]:
    """`View.paired` for `view`: shard -> the number of the view in which this primary and backup became a pair."""
    if before is None:
        return dict.fromkeys(view.backup, view.number)
    if (view.servers, view.primary, view.backup) == (before.servers, before.primary, before.backup):
        return {s: before.paired[s] for s in view.backup}
    now, then = _pairs(view), _pairs(before)
    return {s: before.paired[s] if now[s] == then[s] else view.number for s in view.backup}


def homings(view: View, before: View | None) -> dict[int, ViewNumber]:
    """`View.homed` for `view`: shard -> the number of the view in which this process became its primary."""
    if before is None:
        return dict.fromkeys(view.primary, view.number)
    if (view.servers, view.primary) == (before.servers, before.primary) and None not in _homes(view).values():
        return {s: before.homed.get(s, view.number) for s in view.primary}
    now, then = _homes(view), _homes(before)
    stayed = {shard for shard, home in now.items() if home is not None and home == then.get(shard)}
    return {shard: before.homed.get(shard, view.number) if shard in stayed else view.number for shard in view.primary}


def _alive(view: View, servers: Mapping[str, Member]) -> set[str]:
    incarnations = {member.id: member.incarnation for member in view.servers}
    return {id for id, member in servers.items() if incarnations.get(id) == member.incarnation}


def _pairs(view: View) -> dict[int, list[Member]]:
    """Every shard's primary and backup as members: id and incarnation."""
    members = {member.id: member for member in view.servers}
    return {
        shard: [members[name] for name in (home, view.backup.get(shard)) if name in members]
        for shard, home in view.primary.items()
    }


def _homes(view: View) -> dict[int, Member | None]:
    """Every shard's primary as a member: id and incarnation."""
    members = {member.id: member for member in view.servers}
    return {shard: members.get(home) for shard, home in view.primary.items()}


def _backups(
    placing: Placing, shards: Sequence[Shard], servers: Mapping[str, Member], primary: Mapping[int, str],
    held: Mapping[int, str], weights: Mapping[str, float],
) -> dict[int, str]:  # fmt: skip
    """The backup of every shard, on one of `servers`; `held` are those that stay."""
    hosts = {id: member.host for id, member in servers.items()}
    racks = {id: member.near for id, member in servers.items()}
    return placing.backups(shards, list(servers), primary, held, hosts, racks, weights)


# ---- replicas --------------------------------------------------------------------------------------------------


def following_assignments(
    assigned: Mapping[str, tuple[int, ...]], workers: Sequence[str], replicas: int, furthest: int, speeds: Speeds,
    round: float = 0.0,
) -> tuple[Assignment, ...]:  # fmt: skip
    """Assign the replicas to `workers` (at least one). `assigned` is the assignment of the next step; {} if none.

    The replicas of workers that are gone are reassigned at once. If the result is uneven for the workers' speeds, a
    fair assignment follows, from step `furthest` + AHEAD on.

    `round` is how long a round takes, in seconds; 0 if not known. The part of it that is not computing stays the same
    under any assignment, so a long one makes a move less worth it.
    """
    rates = speeds.rates(workers)
    if not assigned:
        return (Assignment(0, assign_replicas(replicas, sorted(workers), rates)),)
    now = reassign_orphans(assigned, workers, rates)
    if not _is_uneven(now, workers, replicas, rates, speeds, round):
        return (Assignment(0, now),)
    return (Assignment(0, now), Assignment(furthest + AHEAD, assign_replicas(replicas, sorted(workers), rates)))


def _is_uneven(
    now: Mapping[str, tuple[int, ...]], workers: Sequence[str], replicas: int, rates: Mapping[str, float],
    speeds: Speeds, round: float,
) -> bool:  # fmt: skip
    """True if a step takes more than `_WORTH_IT` times as long as with a fair assignment.

    Which replicas that would give to whom takes long to find, and is not needed here.
    """
    computing = speeds.makespan(now, rates)
    beside = max(0.0, round - computing)
    least = replicas / sum(rates[worker] for worker in workers)  # no assignment is done sooner
    if computing + beside <= (least * _ROUNDED + beside) * _WORTH_IT:
        return False
    fair = shares_of(replicas, sorted(workers), rates)
    done = max(share / rates[worker] for worker, share in fair.items())
    return computing + beside > (done + beside) * _WORTH_IT


def contributing(
    workers: Sequence[Member], aggregators: Sequence[Member], assignments: Sequence[Assignment],
    aggregator_of: Mapping[str, str], before: Mapping[str, Sequence[int]],
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """See `contributors`: those of a view with these fields, after one with the contributors `before`."""
    here = {member.id for member in (*workers, *aggregators)}
    known = {worker: {*own} for worker, own in before.items() if worker in here}
    for assignment in assignments:
        for worker, own in assignment.replicas.items():
            known.setdefault(worker, set()).update(own)
    for worker, aggregator in aggregator_of.items():
        known.setdefault(aggregator, set()).update(known.get(worker, ()))
    return {worker: tuple(sorted(own)) for worker, own in sorted(known.items()) if own}


def contributors(
    view: View, before: View | None, of: Callable[..., dict[str, tuple[int, ...]]] = contributing
) -> dict[str, tuple[int, ...]]:
    """`View.contributors` for `view`: of the workers that are here, what they had in `before`, and what they have now.

    A worker that was given up in between begins anew: it sends again what may have been dropped. An aggregator may
    contribute what its workers may, or might: a worker that is gone may have a part in a block that others count on.
    `of` is `contributing`, or remembers its last answer.
    """
    known = {} if before is None else before.contributors
    return of(view.workers, view.aggregators, view.assignments, view.aggregator_of, known)


# ---- news ------------------------------------------------------------------------------------------------------


def says_nothing_new(view: View, before: View, furthest: int) -> bool:
    """True if `view` differs from `before` only in its number and in assignments that no longer count."""
    pending = any(assignment.start > furthest + 1 for assignment in before.assignments)
    same_assignment = len(view.assignments) < 2 and not pending and view.assigned(0) == before.assigned(furthest + 1)
    assignments = before.assignments if same_assignment else view.assignments
    return msgspec.structs.replace(view, number=before.number, assignments=assignments, gaps=before.gaps) == before
