"""What changes from one view to the next when members come and go: the homes of shards, the assignments of replicas.

A shard's *home* is its primary's server. `servers` are the servers that are here now, by id. A server of the view that
is not among them, or that has another incarnation, holds nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rallypoint.core.layout import Shard
from rallypoint.core.placing.placement import place, place_backups
from rallypoint.core.placing.speeds import Speeds
from rallypoint.core.plan.topology import weights_of
from rallypoint.core.view import (
    Assignment,
    Incoming,
    Member,
    View,
    ViewNumber,
    assign_replicas,
    pushes,
    reassign_orphans,
    shares_of,
)

# ---- Who holds one shard, and who is to: what the next view says of its primary, its backup and a third server ----
#
# With `replication=2` a shard whose backup has caught up never gives that backup up for a server that has still to be
# filled. The new server is filled beside it (`View.incoming`), and takes its place when it has caught up too:
#
#     a moves to c      a, backup b     a, backup b, c is filled     c, backup b (or a, on another host than c)
#     a leaves          a, backup b     b, backup a                  b, backup a, c is filled     b, backup c
#     b leaves          a, backup b     a, backup b, c is filled     a, backup c


@dataclass(slots=True)
class Copies:
    """The servers with one shard; "": there is none.

    Attributes:
        home: its primary.
        backup: its backup.
        incoming: the server that is filled beside the backup.
        whole: the backup holds all that was published.
        arrived: so does `incoming`.
    """

    home: str
    backup: str = ""
    incoming: str = ""
    whole: bool = False
    arrived: bool = False

    def succeed(self) -> None:
        """The third server is the backup if there is no other."""
        if not self.backup:
            self.backup, self.whole = self.incoming, self.arrived
            self.incoming, self.arrived = "", False

    def may_move(self, home: str) -> bool:
        """True if that server has all that was published."""
        return (home == self.backup and self.whole) or (home == self.incoming and self.arrived)

    def move(self, home: str, servers: Mapping[str, Member], staying: Mapping[str, Member], *, leaving: bool) -> None:
        """Make `home` the primary, and the backup one of those who hold the shard too: on another host than `home` if
        there is one, and a server that is to leave only if there is no other, and with `leaving`."""
        others = [self.home, *([self.backup] if self.whole else []), *([self.incoming] if self.arrived else [])]
        able = [one for one in others if one != home and (leaving or one in staying)]
        self.backup = min(able, key=lambda one: (one not in staying, _beside(servers[one], servers[home])), default="")
        self.home, self.incoming, self.whole, self.arrived = home, "", bool(self.backup), False

    def fill(self, server: str, *, moves: bool) -> None:
        """`server` is to have the shard: as its backup, or, with `moves`, as its primary once it has caught up."""
        if server == self.backup:
            self.incoming = ""
        elif not self.whole or (server == self.incoming and self.arrived and not moves):
            self.backup, self.incoming = server, ""
        else:
            self.incoming = server


def _beside(one: Member, other: Member) -> int:
    """2 if they are on the same host, 1 if they are near the same place, else 0."""
    return 2 if one.host == other.host else int(bool(one.near) and one.near == other.near)


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
        apart: servers that hold the job up: nothing waits for what they hold.
        arrived: the shards whose third server (`View.incoming`) has caught up.
        settled: no update is on its way: who has all that was published is at the same version as the primary.
    """

    homes: Callable[..., dict[int, str]] = place
    backups: Callable[..., dict[int, str]] = place_backups
    staying: Mapping[str, Member] | None = None
    racks: Mapping[str, float] = field(default_factory=dict)
    hold: bool = False
    stay: bool = False
    apart: AbstractSet[str] = frozenset()
    arrived: AbstractSet[int] = frozenset()
    settled: bool = False


class Homes(NamedTuple):
    """Shard -> its primary, its backup, and the third server that is filled beside them."""

    primary: dict[int, str]
    backup: dict[int, str]
    incoming: dict[int, str]


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
) -> Homes:  # fmt: skip
    """Where each shard is to be for an even load on the servers that stay, by default all `servers`.

    `primary` are the surviving homes. A shard moves in two views: its new home is filled first, and becomes its primary
    when the new homes of all moving shards have caught up. A backup that has caught up stays until then; where the
    primary is to leave, it is the new home itself (`Copies`). Links that are not alike, by what is told of
    servers and by `view.speeds`, get loads in proportion.
    """
    staying = servers if how.staying is None else how.staying
    weights = weights_of(staying, view.speeds, how.racks)
    copies = _copies(view, primary, _alive(view, servers), caught_up, how.arrived)
    if how.hold:
        held = {s: one.backup for s, one in copies.items() if one.backup}
        new = _backups(how, shards, staying, primary, held, weights) if replication >= 2 else {}
        return Homes(dict(primary), new | held, {s: one.incoming for s, one in copies.items() if one.incoming})
    leaving = replication >= 2 and len(staying) > 1  # a server may leave when others have the copies that it has
    for one in copies.values():
        stays = one.whole and (leaving or one.home not in staying) and one.backup not in how.apart
        if one.backup not in staying and not stays:
            one.backup, one.whole = "", False
        one.incoming = one.incoming if one.incoming in staying and one.whole else ""
    wanted = how.homes(shards, list(staying), _held(copies, staying), weights)
    moving = {s: home for s, home in wanted.items() if home != copies[s].home}
    if moving and not how.stay and all(copies[s].may_move(home) for s, home in moving.items()):
        for shard, home in moving.items():
            one = copies[shard]
            one.move(home, servers, staying, leaving=leaving and how.settled and one.home not in how.apart)
        moving = {}
    homes = {s: one.home for s, one in copies.items()}
    if replication < 2:
        return Homes(homes, moving, {})
    kept = {s: b for s, one in copies.items() for b in (one.incoming, one.backup) if b in staying}
    for shard, server in (_backups(how, shards, staying, homes, kept | moving, weights) | moving).items():
        copies[shard].fill(server, moves=shard in moving)
    backups = {s: one.backup for s, one in copies.items() if one.backup}
    return Homes(homes, backups, {s: one.incoming for s, one in copies.items() if one.incoming})


def still_caught_up(
    view: View, before: View, caught_up: AbstractSet[int], arrived: AbstractSet[int] = frozenset()
) -> set[int]:
    """The shards of `caught_up` whose backup in `view` holds all that was published: the pair is the same as in
    `before`, or it has the same copies; and of `arrived` those whose third server is the backup now."""
    now = view.paired
    stayed = {shard for shard in caught_up if shard in now and now[shard] == before.paired[shard]}
    return stayed | {shard for shard in arrived if shard in now and now[shard] == before.incoming[shard].paired}


def pairings(view: View, before: View | None, whole: AbstractSet[int] = frozenset()) -> dict[int, ViewNumber]:
    """`View.paired` for `view`: shard -> the number of the view in which this primary and backup became a pair.

    `whole`: the shards whose new primary and backup both hold all that was published (`View.proven`).
    """
    if before is None:
        return dict.fromkeys(view.backup, view.number)
    if (view.servers, view.primary, view.backup) == (before.servers, before.primary, before.backup):
        return {s: before.paired[s] for s in view.backup}
    now, then, third = _pairs(view, view.backup), _pairs(before, before.backup), _pairs(before, _thirds(before))
    return {
        s: before.paired[s] if now[s] == then[s] or s in whole
        else before.incoming[s].paired if s in third and now[s] == third[s] else view.number
        for s in view.backup
    }


def carried(view: View, before: View, caught_up: AbstractSet[int], arrived: AbstractSet[int]) -> set[int]:
    """The shards with another primary than in `before`, whose old one is here, and whose new primary and backup both
    hold all that was published."""
    here = set(view.servers)
    members = {member.id: member for member in before.servers if member in here}
    moved = [s for s in caught_up if view.primary[s] != before.primary[s] and before.primary[s] in members]
    return {
        s for s in moved
        if {view.primary[s], view.backup.get(s)} <= (
            {before.primary[s], before.backup[s], *((before.incoming[s].server,) if s in arrived else ())}
            & members.keys()
        )
    }  # fmt: skip


def incomings(view: View, before: View | None, incoming: Mapping[int, str]) -> dict[int, Incoming]:
    """`View.incoming` for `view`, with these third servers."""
    known = {} if before is None else before.incoming
    if before is None or not known:
        return {s: Incoming(server, view.number) for s, server in incoming.items()}
    now, then = _pairs(view, incoming), _pairs(before, _thirds(before))
    return {
        s: known[s] if s in known and now[s] == then[s] else Incoming(server, view.number)
        for s, server in incoming.items()
    }  # fmt: skip


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


def _pairs(view: View, beside: Mapping[int, str]) -> dict[int, list[Member]]:
    """Every shard's primary and the server `beside` it as members: id and incarnation."""
    members = {member.id: member for member in view.servers}
    return {
        shard: [members[name] for name in (home, beside.get(shard)) if name in members]
        for shard, home in view.primary.items()
    }


def _thirds(view: View) -> dict[int, str]:
    return {shard: one.server for shard, one in view.incoming.items()}


def _copies(
    view: View, primary: Mapping[int, str], alive: AbstractSet[str], caught_up: AbstractSet[int],
    arrived: AbstractSet[int],
) -> dict[int, Copies]:  # fmt: skip
    """Every shard's copies that are left, with these surviving primaries."""
    found: dict[int, Copies] = {}
    for shard, home in primary.items():
        same = home == view.primary[shard]  # else what is said of a backup was said of another primary's
        one = found[shard] = Copies(home)
        backup, third = view.backup.get(shard, ""), view.incoming.get(shard)
        if backup in alive and backup != home:
            one.backup, one.whole = backup, same and shard in caught_up
        if third is not None and third.server in alive:
            one.incoming, one.arrived = third.server, same and shard in arrived
        one.succeed()
    return found


def _held(copies: Mapping[int, Copies], staying: Mapping[str, Member]) -> dict[int, str]:
    """Who has each shard, for its next placing: where the primary leaves, a backup that has caught up."""
    return {
        s: one.backup if one.whole and one.home not in staying and one.backup in staying else one.home
        for s, one in copies.items()
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
    round: float = 0.0, *, adds_up: bool = False,
) -> tuple[Assignment, ...]:  # fmt: skip
    """Assign the replicas to `workers` (at least one). `assigned` is the assignment of the next step; {} if none.

    The replicas of workers that are gone are reassigned at once. If the result is uneven for the workers' speeds, a
    fair assignment follows, from step `furthest` + AHEAD on.

    `round` is how long a round takes, in seconds; 0 if not known. The part of it that is not computing stays the same
    under any assignment, so a long one makes a move less worth it. Where workers add up neighbouring replicas
    (`adds_up`), it becomes longer with the blocks that they push: 5 + 3 replicas are four blocks, and 4 + 4 are two.
    """
    rates = speeds.rates(workers)
    if not assigned:
        return (Assignment(0, assign_replicas(replicas, sorted(workers), rates)),)
    now = reassign_orphans(assigned, workers, rates)
    if not _is_uneven(now, workers, replicas, rates, speeds, round):
        return (Assignment(0, now),)
    fair = assign_replicas(replicas, sorted(workers), rates)
    if adds_up and not _pays_for_pushes(now, fair, replicas, speeds, rates, round):
        return (Assignment(0, now),)
    return (Assignment(0, now), Assignment(furthest + AHEAD, fair))


def _pays_for_pushes(
    now: Mapping[str, tuple[int, ...]], fair: Mapping[str, tuple[int, ...]], replicas: int, speeds: Speeds,
    rates: Mapping[str, float], round: float,
) -> bool:  # fmt: skip
    """True if a step with the fair assignment is shorter by more than it takes to push its blocks, if there are more of
    them. All of a round that is not computing counts as pushing."""
    computing, done = speeds.makespan(now, rates), speeds.makespan(fair, rates)
    beside, more = max(0.0, round - computing), pushes(fair, replicas) / max(1, pushes(now, replicas))
    return computing + beside > (done + beside * max(1.0, more)) * _WORTH_IT


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
