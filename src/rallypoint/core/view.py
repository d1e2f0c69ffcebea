"""Views: numbered, immutable statements of the members and what each of them does. The higher number wins (I10)."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from rallypoint.core.sums import blocks_of
from rallypoint.core.typed import build_now

_SEVERAL = 4  # shards for each server


class ViewNumber(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The coordinator's epoch (it rises with each start of a coordinator), then its count of views."""

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0  # as many bits as a frame has for it
    count: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.count}"


class Member(msgspec.Struct, frozen=True):
    """A live process: its id in this job, the host it is on, and (servers, aggregators) where it listens.

    `near` names the place where it is (a host, a rack), as it was told when it was started: workers use an aggregator
    that is near the same place, and backups are elsewhere. `link_mbit` is what its link carries in each direction, as
    it was told (0: not told). `incarnation` is a new number that the coordinator gives at every joining. If a process
    joins again after it was given up, or another process joins with the same id, what the old incarnation held does not
    count any more. `kernels` is the digest of a worker's probe, in a job with audits: see `core.audits.alike`.
    """

    id: str
    host: str
    address: str = ""
    incarnation: int = 0
    near: str = ""
    kernels: bytes = b""
    link_mbit: float = 0.0


class Assignment(msgspec.Struct, frozen=True):
    """Which replicas each worker computes, from step `start` on. Example: {"w0": (0, 2), "w1": (1, 3)}."""

    start: int
    replicas: dict[str, tuple[int, ...]]


class EarlyEnd(msgspec.Struct, frozen=True):
    """The job ends with `version`, before its last round: the script on `worker` said so, for this `reason`."""

    version: int
    reason: str = ""
    worker: str = ""


class Lease(msgspec.Struct, frozen=True):
    """An evaluation lease: `holder` evaluates `version`, which may not exist yet. Servers keep it until a later view.

    Attributes:
        holder: "" while nobody is there who could.
        until: no replica of this step or of a later one is computed before another view. Beyond the step of the next
            version that is due only where nothing is decided from evaluations: the lead evaluates those that it passes.
    """

    version: int
    holder: str
    until: int = 0


class Dispute(msgspec.Struct, frozen=True):
    """The workers `heard` have sent different bytes for an audited contribution; `third` computes it once more.

    `third` is "" if there is no third worker, and servers are to take what the replica's owner has sent.
    """

    step: int
    replica: int
    heard: tuple[str, ...]
    third: str = ""


class Incoming(msgspec.Struct, frozen=True, array_like=True):
    """A third `server` is being filled with a shard, beside its primary and its backup; `paired`: see `View.paired`."""

    server: str
    paired: ViewNumber = ViewNumber()


class Tried(msgspec.Struct, frozen=True, array_like=True):
    """The value of a setting that is tuned while the job runs.

    Attributes:
        value: what counts now.
        kept: what counts outside of trials: a coordinator that goes on from a view with a trial goes back to it.
    """

    value: float
    kept: float


class StandingOrders(msgspec.Struct, frozen=True):
    """What holds for everybody beside who is where: each view has those of the one before it, but for what has changed.

    Attributes:
        stop: the job ends before its last round; None while nobody has said so.
        lease: who evaluates which version; None: nobody does, or it is not known yet what the script evaluates.
        reductions: the versions from which on the learning rate is reduced once more (`ReduceOnPlateau`), ascending.
        paused: the operator has paused the job: no replica of this step or a later one is computed; None: it is not.
        disputes: audited contributions on which workers do not agree (`audit=`).
        tuned: setting -> its value in place of the job's, where it is tuned (`tune="auto"`): see `core.plan.tuning`.
        handover: shards move to other servers before this step: no replica of it or of a later one is computed before
            another view; None: none move. A worker that holds this version says so (`core.worker.ending`).
        warming: workers that are to compute, and do not yet: they fetch versions, and say when they hold one.
        ending: a worker holds the last version: all other workers fetch it.
    """

    stop: EarlyEnd | None = None
    lease: Lease | None = None
    reductions: tuple[int, ...] = ()
    paused: int | None = None
    disputes: tuple[Dispute, ...] = ()
    tuned: dict[str, Tried] = {}
    handover: int | None = None
    warming: tuple[str, ...] = ()
    ending: bool = False

    def last(self, rounds: int) -> int:
        """The job's last version, where it would have so many rounds."""
        return rounds if self.stop is None else min(rounds, self.stop.version)


class View(msgspec.Struct, frozen=True):
    """The members, the replicas that each worker computes, and the shards that each server holds.

    Attributes:
        number: the view's number; the higher wins.
        generation: the number of the first view of this generation; whatever carries an older one is stale.
        workers, servers: all members, standby workers included.
        assignments: by ascending `start`. The last one whose `start` is not above a step counts for that step.
        primary, backup: shard index -> server id. A backup may not have caught up yet.
        paired: for each shard with a backup, the number of the view in which these two servers became primary and
            backup. What either said of an earlier pair is stale. If both held all that was published when the shard
            changed its primary, the number of the pair before them stays: it is lower than `homed` (`proven`).
        homed: for each shard, the number of the view in which this process became its primary. A worker may miss views
            in which the shard went to another server and came back: what it had sent to it was dropped.
        incoming: for each shard that moves while its backup has caught up, the server that is to have it: it is filled
            beside the backup, and takes its place, or the primary's, when it has caught up.
        origin: the snapshot from which this generation starts, ``NAME`` or, in another store than the job's,
            ``URL/NAME``; "" if it starts from what `uploader` uploads.
        uploader: the worker that uploads the state with which this generation starts, if `origin` is "".
        gaps: pairs (a, b): views between a and b may have been published by an earlier coordinator, and were not known
            to the one that went on from a with b. What was done in them is not part of this generation's history.
        contributors: worker (or aggregator) -> the replicas of which servers take its contributions: all that it (or
            its workers) was assigned in this generation, but for what was assigned for steps that are long over, and
            its backup tasks. So a contribution that comes late, when
            the replica is somebody else's, is not lost: its sender counts it as delivered.
        aggregators: the aggregators that are here.
        aggregator_of: worker -> the aggregator that it may use. A worker that is not in it uses the servers.
        orders: what holds beside all that.
        speeds: server -> how fast its link was measured to be, compared with the median one. Where it was not, what was
            told of it counts: `core.plan.topology`.
    """

    number: ViewNumber
    generation: ViewNumber
    workers: tuple[Member, ...]
    servers: tuple[Member, ...]
    assignments: tuple[Assignment, ...]
    primary: dict[int, str]
    backup: dict[int, str] = {}
    paired: dict[int, ViewNumber] = {}
    homed: dict[int, ViewNumber] = {}
    origin: str = ""
    uploader: str = ""
    gaps: tuple[tuple[ViewNumber, ViewNumber], ...] = ()
    contributors: dict[str, tuple[int, ...]] = {}
    aggregators: tuple[Member, ...] = ()
    aggregator_of: dict[str, str] = {}
    speeds: dict[str, float] = {}
    incoming: dict[int, Incoming] = {}
    orders: StandingOrders = StandingOrders()

    def paced(self, setting: float) -> float:
        """Mbit/s that each worker and server sends at most, where the job's `pace_mbit` is `setting`; 0: as TCP likes.

        With aggregators nobody is paced: an aggregator gets all of what servers get in parts.
        """
        return 0.0 if self.aggregators else self.setting("pace_mbit", setting)

    def workers_by_port(self) -> bool:
        """True if workers measure what their own ports carry, and pace their links by that.

        With fewer servers than workers it is the servers' ports that are full: a worker that comes late has those to
        itself, and could not use them. For aggregators see `paced`.
        """
        several = len(self.primary) >= _SEVERAL * len(self.servers)  # else it sends to few of them at a time
        return several and not self.aggregators and len(self.servers) >= max(2, self.computing())

    def servers_by_port(self) -> bool:
        """True if servers do the same: where theirs are full too, and carry nothing else (what goes to backups)."""
        return self.workers_by_port() and len(self.servers) == self.computing() and not self.backup

    def port_parts(self) -> dict[str, float]:
        """The part of a worker's port that its link to each server gets: that of the bytes which go there, and at least
        an equal one. Where a link was slow, and its server has few shards for that, what the link carries now must show
        (`MeasuredLinks`)."""
        shards, equal = Counter(self.primary.values()), 1 / max(1, len(self.servers))
        return {one.id: max(equal, shards[one.id] / max(1, len(self.primary))) for one in self.servers}

    def computing(self) -> int:
        """How many workers compute something from the last change on."""
        return sum(map(bool, self.assignments[-1].replicas.values())) if self.assignments else 0

    def in_flight(self, setting: int) -> int:
        """Bytes that may be on their way to one machine at once, where the job's `in_flight_bytes` is `setting`."""
        return round(self.setting("in_flight_bytes", setting))

    def setting(self, name: str, given: float) -> float:
        """The value of a setting that may be tuned, where the job's is `given`."""
        found = self.orders.tuned.get(name)
        return given if found is None else found.value

    def assigned(self, step: int) -> Mapping[str, tuple[int, ...]]:
        """Every worker's replicas at `step`; empty while the job waits for workers."""
        counting = self._counting(step)
        return counting[-1].replicas if counting else {}

    def assignments_from(self, step: int) -> tuple[Assignment, ...]:
        """The assignment that counts at `step` (with `start` 0), and all later ones."""
        counting = self._counting(step)
        now = tuple(msgspec.structs.replace(assignment, start=0) for assignment in counting[-1:])
        return now + self.assignments[len(counting) :]

    def _counting(self, step: int) -> list[Assignment]:
        return [assignment for assignment in self.assignments if assignment.start <= max(0, step)]

    def replicas_of(self, worker: str, step: int) -> tuple[int, ...]:
        """The replicas that `worker` computes at `step`, ascending."""
        return self.assigned(step).get(worker, ())

    def takes_part(self, worker: str, step: int) -> bool:
        """True if `worker` has replicas at `step` or later."""
        later = (assignment.replicas.get(worker) for assignment in self.assignments if assignment.start > step)
        return bool(self.replicas_of(worker, step)) or any(later)

    def takes(self, worker: str, replicas: Iterable[int]) -> bool:
        """True if servers take a contribution of these replicas from `worker` (or aggregator): see `contributors`."""
        return set(self.contributors.get(worker, ())).issuperset(replicas)

    def owner(self, step: int, replica: int) -> str:
        """The worker that computes this replica at `step`; "" if there is none."""
        return next((worker for worker, replicas in self.assigned(step).items() if replica in replicas), "")

    def lead(self, step: int) -> str:
        """The owner of replica 0 at `step`: it saves, and evaluates where there are no leases."""
        return self.owner(step, 0)

    def evaluates(self, worker: str, version: int) -> bool:
        """True if the evaluation of `version` is leased to `worker`."""
        lease = self.orders.lease
        return lease is not None and (lease.holder, lease.version) == (worker, version)

    def moved(self, before: View) -> list[int]:
        """The shards that went to another primary after the view `before`, ascending; also if they came back since."""
        homes = before.primary.items()
        return sorted(s for s, h in homes if self.primary.get(s) != h or self.homed.get(s) != before.homed.get(s))

    def shards_of(self, server: str) -> list[int]:
        """The shards whose primary is `server`, ascending."""
        return sorted(shard for shard, home in self.primary.items() if home == server)

    @property
    def holders(self) -> set[str]:
        """The servers that hold shards: as primaries, as backups, or because they are being filled."""
        return {*self.primary.values(), *self.backup.values(), *(one.server for one in self.incoming.values())}

    def holders_of(self, shard: int) -> tuple[str, ...]:
        """The servers that hold the shard: its primary, its backup, and the one that is being filled."""
        incoming = self.incoming.get(shard)
        named = (self.primary.get(shard), self.backup.get(shard), None if incoming is None else incoming.server)
        return tuple(server for server in named if server is not None)

    def beside(self, shard: int, paired: ViewNumber) -> str:
        """The server that was paired with the shard's primary in the view of that number; "" if that was another pair.
        """
        third = self.incoming.get(shard)
        if third is not None and third.paired == paired:
            return third.server
        return self.backup.get(shard, "") if self.paired.get(shard) == paired else ""

    def proven(self, shard: int) -> bool:
        """True if the shard's backup held all that was published when its primary became that: the primary publishes
        nothing before the backup has proved that it holds the same, or is filled."""
        return shard in self.paired and self.paired[shard] < self.homed.get(shard, self.paired[shard])

    def aggregator(self, worker: str) -> Member | None:
        """The aggregator that `worker` may use; None if it has none."""
        wanted = self.aggregator_of.get(worker)
        return next((member for member in self.aggregators if member.id == wanted), None)

    def server(self, server_id: str) -> Member:
        """The server with that id. Raises KeyError when it is not in this view."""
        for member in self.servers:
            if member.id == server_id:
                return member
        raise KeyError(server_id)


def holds(view: View, server: str) -> bool:
    """True if the server holds a shard: see `View.holders`. Asked for each report of a server."""
    homes = server in view.primary.values() or server in view.backup.values()
    return homes or any(one.server == server for one in view.incoming.values())


def assign_replicas(
    replicas: int, workers: Sequence[str], speeds: Mapping[str, float] | None = None
) -> dict[str, tuple[int, ...]]:
    """Assign replicas 0..R-1 to `workers`; return worker -> its replicas, ascending.

    How many: each replica goes to the worker that would finish it first (greedy list scheduling). Which: neighbours,
    because a worker adds up neighbouring replicas before it sends them (I3); of two orders of the workers, the one with
    fewer blocks to send. Examples: R = 4, workers a and b: {"a": (0, 1), "b": (2, 3)}. R = 5: {"a": (2, 3, 4),
    "b": (0, 1)}, which are the blocks [0,2), [2,4) and [4,5). `speeds` are replicas per second (1 if unknown). If there
    are more than R workers, some get none. Raises ValueError without a worker.
    """
    shares = shares_of(replicas, workers, speeds or {})
    orders = shares, dict(sorted(shares.items(), key=lambda share: share[1]))
    runs = min((_runs(range(replicas), order) for order in orders), key=lambda found: pushes(found, replicas))
    return {worker: runs[worker] for worker in workers}


def shares_of(
    replicas: int, workers: Sequence[str], speeds: Mapping[str, float],
    held: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, int]:  # fmt: skip
    """How many of R replicas each worker gets from `assign_replicas`, in the order of `workers`; it raises the same.

    `held`: what they have before.
    """
    if not workers:
        raise ValueError("there is no worker to assign replicas to")
    cost = {worker: 1.0 / speeds.get(worker, 1.0) for worker in workers}
    shares, before = dict.fromkeys(workers, 0), held or {}
    # When each would have one more
    ends = [((len(before.get(worker, ())) + 1) * cost[worker], number) for number, worker in enumerate(workers)]
    heapq.heapify(ends)
    for _ in range(replicas):
        end, number = ends[0]
        worker = workers[number]
        shares[worker] += 1
        heapq.heapreplace(ends, (end + cost[worker], number))
    return shares


def pushes(assigned: Mapping[str, tuple[int, ...]], replicas: int) -> int:
    """How many blocks the workers push in a step. Example: of 8 replicas, 4 + 4 are two blocks, 5 + 3 are four."""
    return sum(len(blocks_of(own, replicas)) for own in assigned.values())


def _runs(replicas: Sequence[int], shares: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Cut `replicas` into runs of these lengths."""
    stops = list(accumulate(shares.values()))
    return {w: tuple(replicas[stop - share : stop]) for (w, share), stop in zip(shares.items(), stops, strict=True)}


def reassign_orphans(
    assigned: Mapping[str, tuple[int, ...]], workers: Sequence[str], speeds: Mapping[str, float] | None = None
) -> dict[str, tuple[int, ...]]:
    """Reassign the replicas of workers in `assigned` that are not among `workers`; change nothing else.

    An idle worker takes all replicas of a worker that is gone. If none is idle, each replica goes to the worker that
    would finish it first. The other workers keep their replicas: they may have computed them already. `speeds` are
    replicas per second. Raises ValueError without a worker.
    """
    patched = {worker: tuple(assigned.get(worker, ())) for worker in workers}
    orphaned = [own for worker, own in sorted(assigned.items()) if worker not in patched and own]
    idle = [worker for worker in workers if not patched[worker]]
    for worker, own in zip(idle, orphaned, strict=False):
        patched[worker] = own
    left = sorted(replica for own in orphaned[len(idle) :] for replica in own)
    shares = shares_of(len(left), workers, speeds or {}, patched)
    return {worker: tuple(sorted((*patched[worker], *run))) for worker, run in _runs(left, shares).items()}


# ---- A view as the difference to an earlier one: of 10,000 members one dies, and some hundred bytes say so ----
#
#     base 3.7                          difference to 3.7                 view 3.8
#     workers w0 w1 w2          ->      gone: position 1          ->      w0 w2
#     replicas w1: (1,)                 gone: w1, entries w2: (1, 2)      w2: (1, 2)
#
# A difference names its base by number, and carries a digest of the view that it must lead to. So a wrong base, or a
# wrong difference, is found by who applies it, and is never taken for a view.

_K = TypeVar("_K", int, str)
_V = TypeVar("_V")
_DIGEST_BYTES = 16
_MEMBERS = ("workers", "servers", "aggregators")
_ENTRIES = ("primary", "backup", "paired", "homed", "contributors", "aggregator_of", "speeds", "incoming")
_LARGE: dict[str, Any] = {"assignments": (), **dict.fromkeys(_MEMBERS, ()), **{name: {} for name in _ENTRIES}}


class WrongBase(ValueError):
    """This difference does not lead from this view to another one."""


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """Members that are gone, by position in the base, and those that are new, by position in the view."""

    gone: tuple[int, ...] = ()
    new: tuple[tuple[int, Member], ...] = ()


class Entries(msgspec.Struct, Generic[_K, _V], frozen=True, array_like=True):
    """Keys of a table that are gone, and entries that are new or have changed."""

    gone: tuple[_K, ...] = ()
    new: dict[_K, _V] = {}


class Reassigned(msgspec.Struct, frozen=True, array_like=True):
    """An assignment from step `start` on: number `base` of the earlier view's (-1: none), with these changes."""

    start: int
    base: int
    replicas: Entries[str, tuple[int, ...]]


class ViewDifference(msgspec.Struct, frozen=True):
    """What leads from the view with the number `base` to another one.

    Attributes:
        base: the number of the view that it is applied to.
        rest: the other view, without its members and its tables.
        digest: of the whole other view: see `digest_of`.
        assignments: all of the other view, as changes.
        workers, servers, aggregators, primary, backup, paired, homed, contributors, aggregator_of, speeds, incoming:
            the changes of these.
    """

    base: ViewNumber
    rest: View
    digest: Annotated[bytes, msgspec.Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]
    assignments: tuple[Reassigned, ...]
    workers: Moved
    servers: Moved
    aggregators: Moved
    primary: Entries[int, str]
    backup: Entries[int, str]
    paired: Entries[int, ViewNumber]
    homed: Entries[int, ViewNumber]
    contributors: Entries[str, tuple[int, ...]]
    aggregator_of: Entries[str, str]
    speeds: Entries[str, float]
    incoming: Entries[int, Incoming] = Entries()


build_now(ViewDifference)


def canonical(view: View) -> View:
    """The same view, with every table in the order of its keys: equal views then have equal bytes."""
    tables = {name: dict(sorted(getattr(view, name).items())) for name in _ENTRIES}
    assignments = tuple(Assignment(one.start, dict(sorted(one.replicas.items()))) for one in view.assignments)
    return msgspec.structs.replace(view, assignments=assignments, **tables)


def digest_of(view: View) -> bytes:
    """The digest of a `canonical` view: 16 bytes. Equal views have equal ones."""
    return hashlib.blake2b(msgspec.msgpack.encode(view), digest_size=_DIGEST_BYTES).digest()


def difference(base: View, view: View) -> ViewDifference:
    """What leads from `base` to `view`. `view` must be `canonical`."""
    changes: dict[str, Any] = {name: _moved(getattr(base, name), getattr(view, name)) for name in _MEMBERS}
    changes |= {name: _entries(getattr(base, name), getattr(view, name)) for name in _ENTRIES}
    assignments = tuple(_reassigned(base.assignments, one) for one in view.assignments)
    rest = msgspec.structs.replace(view, **_LARGE)
    return ViewDifference(base.number, rest, digest_of(view), assignments, **changes)


def apply(change: ViewDifference, base: View) -> View:
    """The view to which `change` leads from `base`; it is `canonical`. WrongBase if it does not lead to one."""
    if change.base != base.number:
        raise WrongBase(f"a difference to view {change.base}, and view {base.number} is here")
    tables: dict[str, Any] = {name: _joined(getattr(base, name), getattr(change, name)) for name in _MEMBERS}
    tables |= {name: _changed(getattr(base, name), getattr(change, name)) for name in _ENTRIES}
    assignments = tuple(_assignment(base.assignments, one) for one in change.assignments)
    view = canonical(msgspec.structs.replace(change.rest, assignments=assignments, **tables))
    if digest_of(view) != change.digest:
        raise WrongBase(f"a difference that does not lead from view {base.number} to view {view.number}")
    return view


def _moved(base: Sequence[Member], members: Sequence[Member]) -> Moved:
    here, before = set(members), set(base)
    if [one for one in base if one in here] != [one for one in members if one in before]:
        return Moved(tuple(range(len(base))), tuple(enumerate(members)))
    gone = tuple(position for position, one in enumerate(base) if one not in here)
    return Moved(gone, tuple((position, one) for position, one in enumerate(members) if one not in before))


def _joined(base: Sequence[Member], change: Moved) -> tuple[Member, ...]:
    gone, new = set(change.gone), dict(change.new)
    kept = [one for position, one in enumerate(base) if position not in gone]
    rest, members = iter(kept), list[Member]()
    for position in range(len(kept) + len(new)):
        if (one := new.get(position) or next(rest, None)) is None:
            raise WrongBase("a difference with a member at a position that the view does not have")
        members.append(one)
    return tuple(members)


def _entries(base: dict[_K, _V], table: dict[_K, _V]) -> Entries[_K, _V]:
    gone = tuple(key for key in base if key not in table)
    none = object()
    return Entries(gone, {key: value for key, value in table.items() if base.get(key, none) != value})


def _changed(base: dict[Any, _V], change: Entries[Any, _V]) -> dict[Hashable, _V]:
    table = {**base, **change.new}
    for key in change.gone:
        table.pop(key, None)
    return table


def _reassigned(base: Sequence[Assignment], assignment: Assignment) -> Reassigned:
    """As changes to the last assignment of the base, or to the one of the same start if these are fewer."""
    alike = [number for number, one in enumerate(base) if one.start == assignment.start or number == len(base) - 1]
    found = [Reassigned(assignment.start, n, _entries(base[n].replicas, assignment.replicas)) for n in alike]
    found.append(Reassigned(assignment.start, -1, Entries((), assignment.replicas)))
    return min(found, key=lambda one: len(one.replicas.gone) + len(one.replicas.new))


def _assignment(base: Sequence[Assignment], change: Reassigned) -> Assignment:
    if not -1 <= change.base < len(base):
        raise WrongBase(f"a difference to assignment {change.base} of {len(base)}")
    before = base[change.base].replicas if change.base >= 0 else {}
    return Assignment(change.start, _changed(before, change.replicas))  # type: ignore[arg-type]
