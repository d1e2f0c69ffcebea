"""A simulated server: the real machine; names where tensors would be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rallypoint.core.policy import BoundedStaleness, Sync
from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard import server as machine
from rallypoint.core.shard.clip import Measure, Tell, Verdict
from rallypoint.core.shard.server import Plan, ServerMachine
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.server.plan import plan_of
from rallypoint.testing.simulation.job import Content, Mean, SimulatedJob, State
from rallypoint.testing.simulation.member import COORDINATOR, Membership
from rallypoint.testing.simulation.network import Node, Wire, World
from rallypoint.testing.simulation.store import SimulatedStore
from rallypoint.testing.simulation.watch import watch

RETRY_S = 0.1


@dataclass
class Held:
    """One shard's names."""

    master: Content = 0
    sum: Content = 0
    wire: dict[int, Content] = field(default_factory=dict)

    def keep(self, version: int, oldest: int) -> None:
        self.wire[version] = self.master
        self.wire = {v: content for v, content in self.wire.items() if v >= oldest}


class SimulatedServer:
    """One server process."""

    def __init__(self, world: World, name: str, job: SimulatedJob, store: SimulatedStore) -> None:
        self.node, self.job, self.store = Node(world, name), job, store
        plan = plan_of(job.config, job.layout.shards)
        self.machine = self._new_machine(plan)
        self.held: dict[int, Held] = {}
        self.applied: list[tuple[int, int]] = []
        self._prepared = False
        self._filled_under: dict[int, ViewNumber] = {}
        self._followers: list[Wire] = []
        self._askers: dict[str, Wire] = {}
        self._waiting: deque[tuple[ViewNumber, Any]] = deque()
        self._tickets: dict[int, tuple[int, Content]] = {}  # shard and payload
        self._last_ticket = 0
        self._peers: dict[str, tuple[Member, Wire]] = {}
        self._trying: set[tuple[str, int]] = set()
        self._snapshot = ""
        self._inbox: deque[Any] = deque()
        world.acceptors[name] = self
        self.membership = Membership(self.node, "server", self._on_message, self._on_admitted, address=name)

    def _new_machine(self, plan: Plan) -> ServerMachine:
        return watch(ServerMachine(self.node.name, plan), self.node.name)

    # ---- the coordinator's words ----

    def _on_admitted(self, new: bool) -> None:
        if not new and self.machine.caught_up:
            self.membership.send(("in step", self.machine.caught_up))

    def _on_message(self, message: Any) -> None:
        match message:
            case ("prepare", _):
                self._prepared = True
            case ("view", View() as view):
                self._viewed(view)
            case ("capture", id, version, _):
                self._snapshot = id
                self._run(self.machine.capture(version))

    def _viewed(self, view: View) -> None:
        if self.machine.view is not None and view.number <= self.machine.view.number:
            return
        incarnations = {member.id: member.incarnation for member in view.servers}
        for id, (member, wire) in list(self._peers.items()):
            if incarnations.get(id) != member.incarnation:
                wire.close(0)
                del self._peers[id]
        self._run(self.machine.adopt(view))
        for member in view.servers:
            if member.id != self.node.name:
                self._connect(member)
        waiting, self._waiting = self._waiting, deque()
        for number, call in waiting:
            self._when_known(number, call)

    def _when_known(self, number: ViewNumber | None, call: Any) -> None:
        """A frame of a view that has not come here yet waits for it."""
        view = self.machine.view
        if view is None or (number is not None and number > view.number):
            self._waiting.append((number or ViewNumber(), call))
        elif number is None or number >= view.generation:
            call()

    # ---- connections ----

    def accept(self, wire: Wire, hello: Any) -> str:
        role, who, _ = hello
        wire.on_message[1] = lambda message: self._receive(wire, role, who, message)
        wire.on_close[1] = lambda: self._gone(wire, who)
        other = self._askers.get(who)
        if role == "worker" and (other is None or other.number < wire.number):
            self._askers[who] = wire  # what its wire before this one still brings of wants does not count
        return ""

    def _gone(self, wire: Wire, who: str) -> None:
        self._unfollow(wire)
        if self._askers.get(who) is wire:
            del self._askers[who]
            self._run(self.machine.unfollowed(who))

    def _unfollow(self, wire: Wire) -> None:
        if wire in self._followers:
            self._followers.remove(wire)

    def _receive(self, wire: Wire, role: str, who: str, message: Any) -> None:
        number = message[1]
        self._when_known(number, lambda: self._take(wire, role, who, message))

    def _take(self, wire: Wire, role: str, who: str, message: Any) -> None:
        match message:
            case ("push", _, shard, step, replica, content, base, wants) if self.machine.is_primary(shard):
                finite = self.job.is_finite(step, replica)
                ticket = self._ticket(shard, content)
                self._handle(shard, shard_events.Contribute(step, replica, 1.0, ticket, finite, base))
                if wants is not None:
                    self._want(wire, who, shard, wants)
            case ("want", _, shard, replica) if self.machine.is_primary(shard):
                self._want(wire, who, shard, replica)
            case ("initial", _, shard, content, version) if self.machine.is_primary(shard):
                self._handle(shard, shard_events.Initialise(self._ticket(shard, content), version))
            case ("follow", _, on):
                self._unfollow(wire)
                if on:
                    self._followers.append(wire)
                    for index in self.machine.held:
                        shard_machine = self.machine.machine(index)
                        if self.machine.is_primary(index) and shard_machine and shard_machine.published >= 0:
                            self._send_version(wire, index, shard_machine.published)
            case ("fetch", _, shard, version) if shard in self.held and version in self.held[shard].wire:
                shard_machine = self.machine.machine(shard)
                if shard_machine is not None and version <= shard_machine.published:
                    self._send_version(wire, shard, version)
            case ("measures", _, step, measures):
                self._run(self.machine.told(step, measures))
            case ("replicate", _, shard, step, skip, content, replica, rate) if self.machine.takes_from(shard, who):
                update = shard_events.Replicated(step, skip, self._ticket(shard, content), replica, rate)
                self._answer_on(wire, shard, update)
            case ("state", _, shard, version, master, wires, clocks) if self.machine.takes_from(shard, who):
                self.held[shard].master = master
                self.held[shard].wire = dict(wires)
                self._answer_on(wire, shard, shard_events.Loaded(version, clocks))

    def _want(self, wire: Wire, follower: str, index: int, replica: int) -> None:
        if self._askers.get(follower) is wire and self.machine.is_primary(index):
            self._handle(index, shard_events.Want(follower, replica))

    def _reply(self, index: int, reply: shard_effects.Reply) -> None:
        machine = self.machine.machine(index)
        assert machine is not None
        content = self.held[index].wire[reply.version]
        self._check_published(index, reply.version)
        if reply.last:
            assert machine.clocks.steps == [self.job.steps] * machine.expected, f"{reply} before {machine.clocks}"
            self.job.check_end(index, content)
        elif reply.replica < machine.expected:
            self._check_read(index, reply, content)
        version = ("version", self._number, index, reply.version, content, reply.replica, reply.clock)
        self._askers[reply.follower].send(1, version)

    def _check_read(self, index: int, reply: shard_effects.Reply, content: Content) -> None:
        """Everybody reads what they have written; and under a bound whatever is older than that (Ho et al., 2013)."""
        sync = self.job.sync
        bound = reply.clock - sync.staleness if isinstance(sync, BoundedStaleness) else 0
        for replica in range(self.job.expected(index)):
            missing = self.job.written(replica, reply.clock if replica == reply.replica else bound) - content
            assert not missing, f"{self.node.name}: shard {index}: {reply} runs ahead of {sorted(missing)}"

    def _answer_on(self, wire: Wire, index: int, event: shard_events.Event) -> None:
        for effect in self.machine.handle(index, event):
            if isinstance(effect, machine.On) and isinstance(effect.effect, shard_effects.Acknowledge):
                wire.send(1, ("ack", index, effect.effect.version, self._number))
            else:
                self._run([effect])

    # ---- other servers ----

    def _connect(self, member: Member) -> None:
        key = (member.id, member.incarnation)
        if key in self._trying or member.id in self._peers:
            return
        self._trying.add(key)

        def up(wire: Wire) -> None:
            self._trying.discard(key)
            if not self._in_view(member):
                wire.close(0)
                return
            self._peers[member.id] = (member, wire)
            wire.on_message[0] = lambda message: self._from_backup(member, message)
            wire.on_close[0] = lambda: self._peer_lost(member, wire)
            self._run(self.machine.peer_linked(member.id))

        def failed(_: str) -> None:
            self._trying.discard(key)
            if self._in_view(member):
                self.node.later(RETRY_S, lambda: self._connect(member) if self._in_view(member) else None)

        assert self.machine.view is not None
        hello = ("server", self.node.name, self.machine.view.number)
        self.node.world.connect(self.node, member.address, hello, up, failed)

    def _in_view(self, member: Member) -> bool:
        return self.machine.view is not None and member in self.machine.view.servers

    def _peer_lost(self, member: Member, wire: Wire) -> None:
        if self._peers.get(member.id, (None, None))[1] is wire:
            del self._peers[member.id]
            self._run(self.machine.peer_lost(member.id))
            self._connect(member)

    def _from_backup(self, member: Member, message: Any) -> None:
        match message:
            case ("ack", shard, version, number) if self.machine.view is not None:
                current = self.machine.is_primary(shard) and self.machine.view.backup.get(shard) == member.id
                if current and number >= self._filled_under.get(shard, self._number):
                    self._handle(shard, shard_events.Acked(version))

    # ---- effects ----

    def _handle(self, index: int, event: shard_events.Event) -> None:
        self._run(self.machine.handle(index, event))

    @property
    def _number(self) -> ViewNumber:
        assert self.machine.view is not None
        return self.machine.view.number

    def _ticket(self, index: int, content: Content) -> int:
        self._last_ticket += 1
        self._tickets[self._last_ticket] = (index, content)
        return self._last_ticket

    def _payload(self, ticket: int) -> Content:
        """It leaves here: a ticket that is used a second time is not found."""
        return self._tickets.pop(ticket)[1]

    def _run(self, effects: Sequence[machine.Effect]) -> None:
        for effect in effects:
            match effect:
                case machine.Own(shard=shard):
                    self.held[shard] = Held()
                case machine.Disown(shard=shard):
                    del self.held[shard]
                    self._tickets = {t: (index, c) for t, (index, c) in self._tickets.items() if index != shard}
                case machine.Restore():
                    generation = self.machine.view.generation if self.machine.view is not None else None
                    self.node.later(self.node.world.latency() * 4, lambda e=effect, s=generation: self._restore(e, s))  # type: ignore[misc]
                case Tell(step=step, measures=measures):
                    self._send_all_peers("measures", step, measures)
                case Verdict():
                    self.node.later(0.0, lambda e=effect: self._run(self.machine.decided(e)))  # type: ignore[misc]
                case machine.On(shard=shard, effect=on):
                    self._run_on(shard, self.held[shard], on)

    def _restore(self, effect: machine.Restore, generation: ViewNumber | None) -> None:
        """Real servers restore at once: what belongs to a past that is void by now would never have been."""
        for index in effect.shards:
            view = self.machine.view
            if view is None or view.generation != generation or not self.machine.is_primary(index):
                continue
            version, (content, clocks) = self.store.read(effect.origin, index)
            self.held[index].master = State(content) if self.job.averages(index) else content
            self.held[index].keep(version, version)
            self._handle(index, shard_events.Loaded(version, clocks))

    def _run_on(self, index: int, held: Held, effect: shard_effects.Effect) -> None:
        match effect:
            case shard_effects.Install(ticket=ticket, version=version):
                held.master = self._payload(ticket)
                if self.job.averages(index):
                    held.master = State(held.master)
                held.keep(version, version)
            case shard_effects.Take(ticket=ticket):
                held.sum = self._payload(ticket)
            case shard_effects.Add(ticket=ticket):
                held.sum = self.job.add(held.sum, self._payload(ticket))
            case shard_effects.Drop(ticket=ticket, fault=fault):
                self._payload(ticket)
                assert not fault, f"{self.node.name}: shard {index}: {fault}"
            case shard_effects.Finish(step=step, total_weight=total, measure=measure):
                held.sum = self.job.mean(held.sum, total)
                if measure:
                    self._measure(index, step, held.sum, effect)
            case shard_effects.Apply():
                self._apply(index, held, effect)
            case shard_effects.Publish(version=version):
                self._check_published(index, version)
                for wire in list(self._followers):
                    self._send_version(wire, index, version)
            case shard_effects.Fill(version=version):
                self._filled_under[index] = self._number
                self._to_backup(index, "state", version, held.master, tuple(held.wire.items()), self._clocks(index))
            case shard_effects.CaughtUp():
                self.membership.send(("in step", {index: self.machine.caught_up[index]}))
            case shard_effects.Capture(version=version, missed=True):
                self.membership.send(("snapshot lost", self._snapshot, "too late", version))
            case shard_effects.Capture(version=version):
                self._store(index, version, (held.master, self._clocks(index)))
            case shard_effects.Reply():
                self._reply(index, effect)
            case shard_effects.Wait(follower=follower, replica=replica, clock=clock):
                self._askers[follower].send(1, ("wait", self._number, replica, clock))
            case shard_effects.Gather():
                self.node.later(0.002, lambda: self._handle(index, shard_events.Fold()) if index in self.held else None)
            case _:
                pass

    def _clocks(self, index: int) -> tuple[int, ...]:
        machine = self.machine.machine(index)
        return tuple(machine.clocks) if machine is not None else ()

    def _measure(self, index: int, step: int, finished: Content, finish: shard_effects.Finish) -> None:
        if index not in self.job.buffer_shards:
            measure = Measure(index, self.job.norm(index, finished), finish.not_finite)
            self._run(self.machine.measured(step, measure))

    def _apply(self, index: int, held: Held, apply: shard_effects.Apply) -> None:
        self.applied.append((index, apply.step))
        if apply.scale is not None:
            held.sum = self.job.scaled(held.sum, apply.scale)
            averages = self.job.averages(index)
            held.master = Mean(held.sum) if averages else self.job.update(held.master, held.sum, apply.step)
        elif self.job.averages(index):
            held.master = Mean(None)
        if apply.replicate:
            update = (apply.version - 1, apply.scale is None, held.sum, apply.replica, apply.rate)
            self._to_backup(index, "replicate", *update)
        held.keep(apply.version, apply.oldest)

    def _check_published(self, index: int, version: int) -> None:
        """What everybody may see has the right bytes, and a backup that may be promoted holds it (I4).

        Not in a past that is void, where nobody sees it any more (I10): a worker that goes on elsewhere may have let a
        version land over what it still sends to a server that has slept through the roll-back.
        """
        if self._is_stale:
            return
        content = self.held[index].wire[version]
        if not isinstance(content, Mean):
            self.job.check_version(index, version, content.content if isinstance(content, State) else content)
        view = self.machine.view
        if view is None or index not in self.machine.caught_up:
            return
        backup = self.node.world.acceptors.get(view.backup[index])
        if isinstance(backup, SimulatedServer):
            theirs = backup.machine.machine(index)
            if backup.node.alive and theirs is not None and backup.machine.view == view:
                assert theirs.version >= version, (
                    f"{self.node.name} publishes version {version} of shard {index} while its backup "
                    f"{backup.node.name} is at version {theirs.version}"
                )

    @property
    def _is_stale(self) -> bool:
        """Has there been a roll-back that this server has not heard of?"""
        view, deciding = self.machine.view, getattr(self.node.world.acceptors.get(COORDINATOR), "machine", None)
        current = None if deciding is None else deciding.view
        return view is not None and current is not None and view.generation < current.generation

    def check_tally(self, index: int) -> None:
        """Every contribution of the job was applied, folded into another's update, or dropped: once, and no other."""
        machine = self.machine.machine(index)
        assert machine is not None
        tally, job = machine.tally, self.job
        wrong = f"{self.node.name}: shard {index}: {tally}"
        updates = job.steps if job.cadence.together else job.cadence.updates(index)
        assert tally.applied + tally.folded + tally.dropped == updates * machine.expected, wrong
        assert tally.applied + tally.folded == len(self.held[index].master), wrong
        if job.policy.streaming:
            assert sum(tally.staleness.values()) == job.steps * machine.expected, wrong
            assert machine.version == tally.applied + (tally.dropped if job.skip else 0), wrong

    def check_staleness(self) -> None:
        """Between what a contribution was computed from and its own update there are at most (2s + 1)(R - 1) others:
        of each other replica the s steps that were not seen, its own step's, and s that are ahead of it."""
        if not isinstance(sync := self.job.sync, BoundedStaleness):
            return
        for index in self.machine.held:
            machine = self.machine.machine(index)
            assert machine is not None
            most, bound = max(machine.tally.staleness, default=0), (2 * sync.staleness + 1) * (machine.expected - 1)
            assert most <= bound, f"{self.node.name}: shard {index}: {most} updates late, {bound} are allowed"

    def check_tickets(self) -> None:
        """No payload is forgotten: each one that is still here waits for its turn."""
        held = {index: self.machine.machine(index) for index in self.machine.held}
        waiting = sum(len(m._held) for m in held.values() if m is not None)
        assert waiting == len(self._tickets), f"{self.node.name}: {len(self._tickets)} payloads, {waiting} of use"

    def _store(self, index: int, version: int, content: Content) -> None:
        id = self._snapshot

        def write() -> None:
            if self.store.write(id, index, version, content):
                self.membership.send(("captured", id, (index,)))
            else:
                self.membership.send(("snapshot lost", id, "no space left", -1))

        self.node.later(self.node.world.latency() * 2, write)

    def _to_backup(self, index: int, kind: str, *fields: Any) -> None:
        assert self.machine.view is not None
        _, wire = self._peers[self.machine.view.backup[index]]
        wire.send(0, (kind, self.machine.view.number, index, *fields))

    def _send_all_peers(self, kind: str, *fields: Any) -> None:
        assert self.machine.view is not None
        for _, wire in self._peers.values():
            wire.send(0, (kind, self.machine.view.number, *fields))

    def _send_version(self, wire: Wire, index: int, version: int) -> None:
        assert self.machine.view is not None
        wire.send(1, ("version", self.machine.view.number, index, version, self.held[index].wire[version], 0, 0))
