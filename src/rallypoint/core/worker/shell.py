"""A worker's sans-IO shell: the layer between its machine and its sockets. The TCP exchange and the simulation use it.

The shell tracks which links should exist and which are up, ignores what is stale, and returns effects. The caller opens
the links, moves the bytes and runs the effects in order. Only one thread may call the shell at a time (use one lock).
Events of the data plane (one or more per shard) go to `shell.machine.handle` directly.

Adopt a view in three steps, because links have to end before the machine gets the view:

    ended = shell.links_to_end(view)        # None: this view is not newer than the one in force
    ...end those links, so that none of their threads touches a slot any more...
    effects = shell.adopt(view, ended)      # run them
    ...make a link to each of shell.links.to_open(view)...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from rallypoint.core.audits import Audits
from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.modes import ModeTraits, Pace, StateHolder
from rallypoint.core.sums import Presum
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.core.worker import slots
from rallypoint.core.worker.aligned import OverlapMachine, WorkerMachine, is_between
from rallypoint.core.worker.ending import Ending, LeasedVersion, Reaching
from rallypoint.core.worker.handover import CodecStateCustody, Key, NoCodecStates, Paths
from rallypoint.core.worker.rolling import RollingMachine
from rallypoint.core.worker.streaming import StreamMachine


class WorkerSnapshots:
    """The interface, for jobs in which nothing of a worker goes into a snapshot: the servers write it alone.

    Attributes:
        version: that of the snapshot that needs codec states; 0: none.
        sent: the server and the number of the connection to which each codec state's copy was sent last.
    """

    version = 0

    def __init__(self) -> None:
        self.sent: dict[Key, tuple[str, int]] = {}

    def wanted(self, snapshot: slots.Store) -> None:
        """The coordinator asks for this worker's part of `snapshot`."""

    def due(self, holds: int) -> slots.Store | None:
        """The share that the main thread has to store now, or None; `holds` is the version of the model."""
        return None

    def begun(self) -> None:
        """The main thread begins to store the share that `due` returned."""

    def copies(self, send: slots.Send, connections: Mapping[str, int]) -> bool:
        """True if the codec state before this contribution belongs to the requested snapshot, and goes with it now."""
        return False

    def owed(self, replicas: Iterable[int], paths: Paths, view: ViewNumber) -> list[slots.GiveCopy]:
        """The copies of these replicas' codec states that may be sent now, and were not. Changes nothing."""
        return []

    def rolled_back(self) -> None:
        """Drop the request for codec states: a new generation has begun."""


class ModelShares(WorkerSnapshots):
    """For AllReduce: each worker stores a share of the model, once its model is at the snapshot's version or later."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted: slots.Store | None = None

    def wanted(self, snapshot: slots.Store) -> None:
        self._wanted = snapshot

    def due(self, holds: int) -> slots.Store | None:
        return self._wanted if self._wanted is not None and holds >= self._wanted.version else None

    def begun(self) -> None:
        self._wanted = None


class CodecStateSnapshots(WorkerSnapshots):
    """For codecs with states, those of `shards`: the states of version v are those before the first contribution
    computed from v, or after it and with it. They go with that contribution; or at once, if it was sent already, or is
    not computed for now (the job is paused). A server that does not get them all gives the snapshot up; of the last
    version it stores none."""

    def __init__(self, machine: WorkerMachine, shards: Collection[int]) -> None:
        super().__init__()
        self._machine, self._shards = machine, shards

    def wanted(self, snapshot: slots.Store) -> None:
        self.version = snapshot.version
        self.sent.clear()

    def copies(self, send: slots.Send, connections: Mapping[str, int]) -> bool:
        if not (send.step == self._before(send.shard) > 0 and send.shard in self._shards):
            return False
        key, way = (send.shard, send.replica), (send.server, connections.get(send.server, 0))
        before, self.sent[key] = self.sent.get(key), way
        return before != way

    def owed(self, replicas: Iterable[int], paths: Paths, view: ViewNumber) -> list[slots.GiveCopy]:
        ways = [(shard, self._before(shard), paths.to(shard)) for shard in self._shards]
        return [
            slots.GiveCopy(shard, replica, before, way[0], view)
            for replica in replicas for shard, before, way in ways
            if before > 0 and way is not None and self.sent.get((shard, replica)) != way
        ]  # fmt: skip

    def _before(self, shard: int) -> int:
        return self._machine.cadence.updates_before(shard, self.version)

    def rolled_back(self) -> None:
        self.version = 0
        self.sent.clear()


class LinkTable:
    """The links of worker `me` to servers, and to its aggregator, which counts as a server here.

    `connections`: server id -> connection number, for the links that are up. A link that is opened again has a new
    number.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self.connections: dict[str, int] = {}
        self._links: dict[str, Member] = {}  # all open links, up or not
        self._connected = 0

    @property
    def servers(self) -> list[str]:
        """The servers to which there are links, up or not."""
        return list(self._links)

    def to_end(self, before: View | None, view: View, *, between: bool = False) -> list[str]:
        """The servers whose links have to end before `view` counts; `before` is the view in force.

        These are servers that were replaced, and servers that lost a shard (they may still be sending it while its new
        primary sends it too), also if they have it again. `between`: shards move between two steps, and nothing is on
        its way; then these links stay. In a new generation it is all of them: what they are sending is stale.
        """
        if before is not None and before.generation != view.generation:
            return self.servers
        losing = set() if before is None or between else {before.primary[shard] for shard in view.moved(before)}
        wanted = self._wanted(view)
        return [id for id, member in self._links.items() if id in losing or member not in wanted]

    def to_open(self, view: View) -> list[Member]:
        """The servers of `view` to open a link to. Each is returned once: from then on it counts as linked."""
        new = [member for member in self._wanted(view) if member.id not in self._links]
        self._links |= {member.id: member for member in new}
        return new

    def _wanted(self, view: View) -> tuple[Member, ...]:
        aggregator = view.aggregator(self._me)
        return view.servers if aggregator is None else (*view.servers, aggregator)

    def end(self, server: str) -> None:
        """Drop the link: it has ended and will not be opened again."""
        del self._links[server]

    def up(self, server: str) -> bool:
        """The link is up (again). Returns False, and does nothing, if the link was ended meanwhile."""
        if server not in self._links:
            return False
        self._connected += 1
        self.connections[server] = self._connected
        return True

    def lost(self, server: str) -> None:
        """The link is down; it may come up again."""
        self.connections.pop(server, None)

    def validate(self, view: View | None) -> None:
        """Raise AssertionError with a sentence if there are links to servers that are not in the view."""
        servers = set(self._wanted(view)) if view is not None else set()
        strangers = {member.id for member in self._links.values() if member not in servers}
        assert not strangers, f"links to {strangers}, which are not in the view"
        assert self.connections.keys() <= self._links.keys(), f"{set(self.connections) - set(self._links)} not linked"
        assert len(set(self.connections.values())) == len(self.connections), "two connections have one number"

    def follow(self, view: View, *, on: bool) -> list[slots.Effect]:
        """Follow each server of `view` that is linked, or (`on=False`) follow it no more."""
        linked = sorted(self.connections.keys() & {server.id for server in view.servers})
        return [slots.Follow(server, on) for server in linked]


@dataclass(slots=True)
class Route:
    """The route of worker `me`'s contributions and versions: through the aggregator that the view gives it (`through`:
    its id), or straight to the servers ("").

        direct -> through   a step begins (nothing of it was sent), and the link to the aggregator is up
        through -> direct   that link is lost, at once: what was sent of the step in progress is computed and sent again

    A worker keeps its links to all servers in either case, so it waits for nobody when it loses its aggregator. First
    weights, states and rows go straight to the servers always. The machine does not know of routes: it gets a view in
    which the aggregator is the primary of every shard.

    A worker that has lost its aggregator goes back to the same process after 2, 4, 8, ... steps.
    """

    me: str
    through: str = ""
    _member: Member | None = None  # the aggregator that the view gives it
    _losses: int = 0
    _rest: int = 0

    def adopt(self, view: View) -> None:
        """A view is in force. The link to an aggregator that it does not give this worker has ended already."""
        member = view.aggregator(self.me)
        if member != self._member:
            self._member, self._losses, self._rest = member, 0, 0

    @property
    def aggregator(self) -> str:
        """The id of the aggregator that the view gives this worker; "" if it gives none."""
        return "" if self._member is None else self._member.id

    def leave(self, *, broken: bool) -> None:
        """Use the servers from now on. `broken`: the link to the aggregator broke, and was not ended from here."""
        self.through = ""
        if broken:
            self._losses += 1
            self._rest = min(1 << self._losses, 64)  # steps

    def step_begins(self) -> bool:
        """A step begins. Returns True if it may go through the aggregator, once the link to that is up."""
        if self._rest:
            self._rest -= 1
        return self._member is not None and not self.through and not self._rest

    def takes_from(self, server: str) -> bool:
        """True if versions that come from this server (or aggregator) belong into this worker's slots."""
        return server == self.through if self.through else server != self.aggregator

    def seen(self, view: View) -> View:
        """`view` as the machine gets it: the aggregator in use is the primary of every shard."""
        if not self.through:
            return view
        assert self._member is not None
        return msgspec.structs.replace(
            view, servers=(*view.servers, self._member), primary=dict.fromkeys(view.primary, self.through),
            backup={}, paired={}, homed={},
        )  # fmt: skip

    def only_on_it(self, effects: Iterable[slots.Effect], step: int) -> list[slots.Effect]:
        """`effects` without requests to follow servers that are not on the route; `step`: see `Follow`."""
        if not self.through:
            return list(effects)
        on_it = (e for e in effects if not isinstance(e, slots.Follow) or e.server == self.through)
        return [replace(effect, step=max(0, step)) if isinstance(effect, slots.Follow) else effect for effect in on_it]


Machine = WorkerMachine | StreamMachine | RollingMachine


class WorkerShell:
    """One worker in one job: its machine, its codec states, its links to servers.

    Attributes:
        machine: decides what to compute, send and install.
        links: the links to servers, and which of them are up.
        route: through which of them contributions and versions go.
        states: decides when codec states move to and from the servers.
        snapshots: this worker's part of the requested snapshot.
        holds: the version of the model where workers step the optimizer (AllReduce), else -1. It keeps its value when
            a new generation makes that version stale.
        finished: the job has finished (`finish`).
        leaving: this worker was told to leave.
        ending: whether the model holds the job's last version.
        leased: the version that this worker is to evaluate, and how far it may go.
        reaching: what it is to say of the version that it holds. Ask it after `adopt` and `installed`.
    """

    def __init__(self, machine: Machine, states: NoCodecStates, snapshots: WorkerSnapshots) -> None:
        self.machine, self.states, self.snapshots = machine, states, snapshots
        self.links, self.route = LinkTable(machine.me), Route(machine.me)
        self._view: View | None = None  # as it was published; the machine gets it as `route` has it
        self.holds = -1
        self.ending, self.leased, self.reaching = Ending(machine), LeasedVersion(machine), Reaching(machine)
        self.finished = self.leaving = False
        self._about: int | None = None  # the replica that is being computed, or will be at once

    # ---- views and links ----

    @property
    def view(self) -> View:
        """The view in force. Call it only after the first view was adopted."""
        assert self._view is not None
        return self._view

    @property
    def number(self) -> ViewNumber:
        return self._view.number if self._view is not None else ViewNumber()

    def links_to_end(self, view: View) -> list[str] | None:
        """The ids of servers whose links to end before `adopt(view)`; None if `view` is not newer: ignore it then."""
        before = self._view
        if before is not None and view.number <= before.number:
            return None
        if before is not None and _came_back(self.machine.me, before, view):
            return self.links.servers  # what this worker sent when it was given up may have been dropped
        between = before is not None and is_between(self.machine, before, view)
        return self.links.to_end(before, view, between=between)

    def adopt(self, view: View, ended: Iterable[str]) -> list[slots.Effect]:
        """Put `view` in force, after the links to the servers `ended` have ended. Returns the effects to run."""
        before = self._view
        effects: list[slots.Effect] = []
        for server in ended:
            self.links.end(server)
            effects += self.link_lost(server, broken=False)
        self._view = view
        self.route.adopt(view)
        effects += self.route.only_on_it(self.machine.handle(slots.Viewed(self.route.seen(view))), self.machine.step)
        keeps, sent = self.machine.keeps, [*self.snapshots.sent.items()]  # servers may have refused others' copies
        self.snapshots.sent = {key: way for key, way in sent if key[1] in keeps}
        if before is not None and before.generation != view.generation:
            self.states.rolled_back()
            self.snapshots.rolled_back()
        # A worker that was given up and came back returns all of its codec states: another worker may have newer ones.
        back = before is not None and _came_back(self.machine.me, before, view)
        self.leased.adopt(view, back=back)
        return [*effects, *self._keep_only(frozenset() if back else keeps)]

    def link_up(self, server: str) -> list[slots.Effect]:
        """The link to `server` is up (again). Returns the effects to run."""
        if not self.links.up(server) or server == self.route.aggregator:
            return []  # `adopt` has ended it meanwhile; or the next step goes through it
        effects = self.route.only_on_it(self.machine.handle(slots.LinkUp(server)), self.machine.step)
        return [*effects, *self._keep_only(self.machine.keeps)]

    def link_lost(self, server: str, *, broken: bool = True) -> list[slots.Effect]:
        """The link to `server` is down; the caller may open it again, if it is `broken`. Returns the effects to run."""
        self.links.lost(server)
        if server != self.route.through:
            return [] if server == self.route.aggregator else self.machine.handle(slots.LinkLost(server))
        # All that the aggregator may have had is computed and sent again, to the servers.
        self.route.leave(broken=broken)
        follow = self.links.follow(self.view, on=True) if self.machine.following else []
        return [*follow, *self.machine.handle(slots.LinkLost(server)), *self.machine.handle(slots.Viewed(self.view))]

    # ---- the route ----

    def arriving(self, event: slots.Arriving, server: str) -> list[slots.Effect]:
        """The header of a version has arrived from `server`. Returns Land or Discard, and other effects to run."""
        return self.machine.handle(event) if self.route.takes_from(server) else [slots.DropArriving(event.shard)]

    def _go_through_aggregator(self) -> list[slots.Effect]:
        """A step begins: from this one on all contributions go through the aggregator, if it can be reached."""
        machine, route = self.machine, self.route
        if not route.step_begins() or not machine.following or route.aggregator not in self.links.connections:
            return []
        busy = any(slot in (slots.Slot.LANDING, slots.Slot.QUEUED) for slot in machine.slots)
        if busy or machine.presum.sent or not 0 <= machine.step < machine.steps:
            return []
        route.through = route.aggregator
        effects = [*machine.handle(slots.Viewed(route.seen(self.view))), *machine.handle(slots.LinkUp(route.through))]
        effects = [effect for effect in effects if not isinstance(effect, slots.Follow)]
        return [slots.Follow(route.through, step=machine.step), *self.links.follow(self.view, on=False), *effects]

    @property
    def paths(self) -> Paths:
        """The primary of each shard, and the links that are up."""
        return Paths(self.view.primary, self.links.connections)

    # ---- what the main thread does ----

    def next_action(self) -> slots.Action | slots.Store | slots.Ended | slots.Evaluate | None:
        """The main thread's next action; None when it has to wait. Changes nothing."""
        action: slots.Action | slots.Store | slots.Ended | None = self.snapshots.due(self.holds)
        if action is None and self.ending.due:
            action = slots.Ended(self.machine.step)
        elif action is None:
            action = self.machine.next_action()
            if self.leased.holds_back(self._view, action):
                action = None
            # Do not wait for a replica that was reassigned during its step: its new worker has the codec states by now.
            waits = isinstance(action, slots.Compute) and action.replica in self.machine.assigned
            if waits and isinstance(action, slots.Compute) and not self.states.ready(action.replica):
                action = None
        return self.leased.due(self._view, action) or action

    def choose(self) -> slots.Action | slots.Store | slots.Ended | slots.Evaluate | None:
        """Like `next_action`, and note that the main thread is about to do what is returned."""
        action = self.next_action()
        if isinstance(action, slots.Store):
            self.snapshots.begun()
        elif isinstance(action, slots.Ended):
            self.ending.take()
        self._about = action.replica if isinstance(action, slots.Compute) else None
        return action

    @property
    def may_prepare(self) -> bool:
        """True if `prepare` would do something now. Changes nothing."""
        known = self.states.kept and self._view is not None
        return known and (self.states.may_prepare(self._awaited(), self.paths) or bool(self._owed()))

    def prepare(self) -> list[slots.Effect]:
        """Recall the codec states of the next replica. Call it when the main thread is about to wait.

        It also gives back the codec states of a replica that was reassigned before the main thread began to compute it:
        its new worker waits for them. And it copies those that a snapshot needs. Returns the effects to run.
        """
        if not self.states.kept or self._view is None:
            return []
        self._about = None
        effects = [*self._keep_only(self.machine.keeps), *self.states.prepare(self._awaited(), self.paths)]
        owed = self._owed()
        self.snapshots.sent |= {(c.shard, c.replica): (c.server, self.links.connections[c.server]) for c in owed}
        return [*effects, *owed]

    def _awaited(self) -> int | None:
        """The replica whose codec states are needed next; in a snapshot's version those of all are."""
        action = self.machine.next_action()
        if not isinstance(action, slots.Compute) or action.replica not in self.machine.assigned:
            return None
        others = sorted(self.machine.assigned) if self.machine.step == self.snapshots.version else ()
        return next((r for r in (action.replica, *others) if not self.states.ready(r)), action.replica)

    def _owed(self) -> list[slots.GiveCopy]:
        if not self.machine.step == self.snapshots.version < self.machine.steps or self.next_action() is not None:
            return []
        ready = [replica for replica in sorted(self.machine.assigned) if self.states.ready(replica)]
        return self.snapshots.owed(ready, self.paths, self.number)

    def finish(self) -> None:
        """The job has finished: nothing is left to do, and what is being computed will not be used."""
        self.finished = True
        self.machine.rewound = self.machine.computing

    @property
    def over(self) -> bool:
        """True when this worker has nothing left to do: the job has finished, or the worker has left."""
        return self.finished or self.gone

    @property
    def gone(self) -> bool:
        """True when this worker was told to leave and may: it has no replicas, codec states or weights to upload."""
        gone = self._view is not None and not self.machine.takes_part
        return self.leaving and gone and self.states.settled and not self.machine.must_upload

    def begin_upload(self) -> ViewNumber | None:
        """Begin to upload the first weights. Returns their generation; None if this worker is not to upload now."""
        return self.view.generation if self.machine.take(slots.UploadFirst()) else None

    def begin_replica(self, step: int, replica: int) -> ViewNumber | None:
        """Begin to compute `replica` of `step`. Returns its generation; None if it is not (or no longer) next."""
        action = slots.Compute(step, replica)
        if self.finished or self.leased.holds_back(self._view, action) or not self.machine.take(action):
            return None
        self.states.begin(replica)
        return self.view.generation

    def end_replica(self, *, whole: bool) -> list[slots.Effect]:
        """The main thread stopped computing the replica and writes no slot now; `whole`: it computed all of it."""
        self._about = None
        effects = self.machine.handle(slots.ReplicaComputed() if whole else slots.ReplicaAbandoned())
        return [*effects, *self._keep_only(self.machine.keeps - self.states.end())]

    def installed(self) -> list[slots.Effect]:
        """The main thread has copied the version into the model: free the slots. Returns the effects to run."""
        effects = self.machine.handle(slots.Installed())
        effects += self._go_through_aggregator()
        return [*effects, *self._keep_only(self.machine.keeps)]

    def _keep_only(self, replicas: frozenset[int]) -> list[slots.Effect]:
        if not self.states.kept or self._view is None:
            return []
        return self.states.keep_only(replicas | ({self._about} if self._about is not None else set()), self.paths)

    def validate(self) -> None:
        """Raise AssertionError with a sentence if an invariant of the shell does not hold. It leaves out the machine's
        own `validate`."""
        self.links.validate(self._view)


def _came_back(worker: str, before: View, view: View) -> bool:
    """True if the worker was given up between the two views, and has joined again."""
    return _incarnation(before, worker) not in (-1, _incarnation(view, worker))


def _incarnation(view: View, worker: str) -> int:
    return next((member.incarnation for member in view.workers if member.id == worker), -1)


# ---- A worker's shell, from the mode's description. Nothing else in `core/worker` reads that ----


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker's machine and links need to know of the job.

    Attributes:
        shards: the number of shards.
        buffer_shards: the shards to which only one replica contributes: replica 0, or the one in `carried`.
        rounds: the job's last version.
        mode: the description of the mode.
        cadence: the shards that each round updates.
        codec_state_shards: the shards whose codec has a state for each replica.
        presum: what the worker adds up before it sends it.
        overlaps: a forward pass may begin before all of its version is here.
        audits: the contributions that a second worker computes too; None: there are none.
        carried: by shard of carried state, the replica that carries it.
        sums: a version of a shard is a sum, and each shard goes on by itself (`RollingMachine`).
    """

    shards: int
    buffer_shards: frozenset[int]
    rounds: int
    mode: ModeTraits
    cadence: Cadence = TOGETHER
    codec_state_shards: tuple[int, ...] = ()
    presum: tuple[frozenset[int], int, int] = (frozenset(), 1, 1)  # see `core/sums.py`: Presum
    overlaps: bool = False
    audits: Audits | None = None
    carried: Mapping[int, int] = field(default_factory=dict)
    sums: bool = False


def shell_for(me: str, plan: WorkerPlan) -> WorkerShell:
    """Build the shell and machine of the worker `me`."""
    states = CodecStateCustody(plan.codec_state_shards) if plan.codec_state_shards else NoCodecStates()
    machine: Machine
    snapshots = WorkerSnapshots()
    match plan.mode.pace:
        case Pace.OWN:
            machine = StreamMachine(me, plan.shards, plan.buffer_shards, plan.rounds)
        case Pace.ROUNDS if plan.sums:
            machine = RollingMachine(me, plan.shards, plan.buffer_shards, plan.rounds)
        case Pace.ROUNDS:
            machine = (OverlapMachine if plan.overlaps else WorkerMachine)(
                me, plan.shards, plan.buffer_shards, plan.rounds, cadence=plan.cadence,
                in_order=plan.mode.holder is StateHolder.WORKERS, presum=Presum(*plan.presum),
                audits=plan.audits, carried=plan.carried,
            )  # fmt: skip
            if plan.mode.holder is StateHolder.WORKERS:
                snapshots = ModelShares()
            elif states.kept:
                snapshots = CodecStateSnapshots(machine, plan.codec_state_shards)
    return WorkerShell(machine, states, snapshots)
