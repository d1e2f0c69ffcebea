"""A simulated server: the real machine and the real shell; names where tensors would be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard import server as machine
from rallypoint.core.shard.clip import Measure, Tell, Verdict
from rallypoint.core.shard.links import Key, PeerLinks
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.shard.shell import Answer, ServerShell
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.messages import Finished
from rallypoint.server.plan import plan_of
from rallypoint.server.service import LEAVING_EVERY_S
from rallypoint.testing.simulation import server_checks
from rallypoint.testing.simulation.codec_states import Coded, Residual, ServerCodecStates, States
from rallypoint.testing.simulation.job import Content, Mean, SimulatedJob, State
from rallypoint.testing.simulation.member import Membership
from rallypoint.testing.simulation.network import Node, Wire, World
from rallypoint.testing.simulation.store import SimulatedStore
from rallypoint.testing.simulation.watch import watch

RETRY_S = 0.1
Effects = Iterable[machine.Effect | Answer[Wire]]


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
    """One server process. `decision_s`: a verdict waits in its inbox for up to so long."""

    decision_s = 0.004

    def __init__(self, world: World, name: str, job: SimulatedJob, store: SimulatedStore) -> None:
        self.node, self.job, self.store = Node(world, name), job, store
        plan = plan_of(job.config, job.layout.shards)
        self.machine = watch(ServerMachine(name, plan), name)
        self.shell: ServerShell[Wire] = ServerShell(self.machine)
        self.held: dict[int, Held] = {}
        self.applied: list[tuple[int, int]] = []
        self.decided: dict[tuple[ViewNumber, int], tuple[int, float | None]] = {}  # shard and scale by step
        self.used: dict[tuple[ViewNumber, int, int, int], int] = {}  # generation, shard, replica, state -> step
        self._links = PeerLinks(name, decides=bool(plan.decides))
        self._dialed: dict[Key, Wire | None] = {}
        self._waiting: deque[tuple[ViewNumber, Callable[[], None]]] = deque()
        self._tickets: dict[int, tuple[int, Content]] = {}  # shard and payload
        self._last_ticket = 0
        self._snapshot = ""
        self.leaving = False
        self._codec_states = ServerCodecStates(name, job, self._tell, self._write) if job.codec_state_shards else None
        world.acceptors[name] = self
        self.membership = Membership(self.node, "server", self._on_message, self._on_admitted, address=name)

    # ---- the coordinator's words ----

    def _on_admitted(self, new: bool) -> None:
        if shards := self.shell.say_again(new=new):
            self.membership.send(("in step", shards))

    def leave(self) -> None:
        """SIGTERM: it hands its shards over. It says so again: a coordinator that takes over has not heard it."""
        self.leaving = True
        self.membership.send(("leaving",))
        self.node.later(LEAVING_EVERY_S, self.leave)

    def _on_message(self, message: Any) -> None:
        match message:
            case Finished():
                self.membership.close()
                self.node.kill()
            case ("view", View() as view) if not self.shell.fence.has_come(view.number):
                self._viewed(view)
            case ("capture", id, version, _):
                self._snapshot = id
                if self._codec_states is not None:
                    self._codec_states.abandon()
                self._run(self.machine.capture(version))

    def _viewed(self, view: View) -> None:
        if self._codec_states is not None:
            self._codec_states.adopt(view, self.machine.view)
        self._run(self.shell.adopt(view))
        gone, new = self._links.adopt(view)
        for key in gone:
            if (wire := self._dialed.pop(key)) is not None:
                wire.close(0)
        for member in new:
            self._dialed[member.id, member.incarnation] = None
            self._dial(member)
        waiting, self._waiting = self._waiting, deque()
        for number, call in waiting:
            self._when_known(number, call)

    def _when_known(self, number: ViewNumber, call: Callable[[], None]) -> None:
        """A frame of a view that has not come here yet waits for it."""
        if not self.shell.fence.has_come(number):
            self._waiting.append((number, call))
        elif not self.shell.fence.is_stale(number):
            call()

    # ---- connections ----

    def accept(self, wire: Wire, hello: Any) -> str:
        role, who, _ = hello
        wire.on_message[1] = lambda message: self._when_known(message[1], lambda: self._take(wire, who, message))
        wire.on_close[1] = lambda: self._run(self.shell.gone(wire, who))
        if role == "worker":
            self.shell.linked(wire, who)
        return ""

    def _take(self, wire: Wire, who: str, message: Any) -> None:
        server_checks.check_current(self, who, message)
        shell = self.shell
        match message:
            case ("push", number, shard, step, replica, content, base, wants) if shell.takes(shard, number):
                if self._codec_states is not None and isinstance(content, Coded):
                    self._codec_states.contributed(shard, content, who, self._upcoming(shard, replica))
                finite = self.job.is_finite(step, replica)
                ticket = self._ticket(shard, content)
                self._handle(shard, shard_events.Contribute(step, replica, 1.0, ticket, finite, base))
                if wants is not None:
                    self._run(shell.want(wire, who, shard, wants))
            case ("want", _, shard, replica):
                self._run(shell.want(wire, who, shard, replica))
            case ("initial", number, shard, content, version) if shell.takes(shard, number):
                self._handle(shard, shard_events.Initialise(self._ticket(shard, content), version))
            case ("follow", _, False):
                shell.unfollow(wire)
            case ("follow", _, True):
                for index, version in shell.follow(wire):
                    self._send_version(wire, index, version)
            case ("fetch", _, shard, version) if shell.may_see(shard, version) and version in self.held[shard].wire:
                self._send_version(wire, shard, version)
            case ("give", number, shard, replica, state) if self._codec_states is not None:
                if shell.takes(shard, number):
                    self._codec_states.given(shard, replica, state, who, self._upcoming(shard, replica))
            case ("copy", number, shard, replica, Residual() as state) if self._codec_states is not None:
                if shell.takes(shard, number):
                    self._codec_states.copied(shard, replica, state)
            case ("recall", _, shard, replica) if self._codec_states is not None:
                if shell.is_current(wire, who) and self.machine.is_primary(shard):
                    self._codec_states.recalled(shard, replica, who, self._upcoming(shard, replica))
            case ("measures", number, step, measures):
                self._run(shell.told(step, measures, number))
            case ("replicate", number, shard, step, skip, content, replica, rate):
                if shell.takes_from(shard, who, number):
                    update = shard_events.Replicated(step, skip, self._ticket(shard, content), replica, rate)
                    self._run(shell.replicated(wire, shard, update))
            case ("state", number, shard, version, master, wires, clocks) if shell.takes_from(shard, who, number):
                self.held[shard].master = master
                self.held[shard].wire = dict(wires)
                self._run(shell.replicated(wire, shard, shard_events.Loaded(version, clocks)))

    def _upcoming(self, shard: int, replica: int) -> int:
        """The next step of which the shard takes that replica's contribution."""
        machine = self.machine.machine(shard)
        assert machine is not None
        return machine.clock(replica) + machine.knows(replica)

    def _tell(self, worker: str, message: Any) -> None:
        if (wire := self.shell.workers.get(worker)) is not None:
            wire.send(1, message)

    # ---- other servers ----

    def _dial(self, member: Member) -> None:
        """As a dialer does it: until the view wants this link no more."""
        key = (member.id, member.incarnation)

        def up(wire: Wire) -> None:
            if key not in self._dialed:
                wire.close(0)
                return
            self._dialed[key] = wire
            wire.on_message[0] = lambda ack: self._run(self.shell.acked(member.id, wire, *ack[1:]))
            wire.on_close[0] = lambda: down(wire)
            self._run(self.shell.peer_linked(member, wire))

        def down(wire: Wire) -> None:
            self._run(self.shell.peer_lost(member.id, wire))
            again()

        def again() -> None:
            if key in self._dialed:
                hello = ("server", self.node.name, self.shell.fence.number)
                self._dialed[key] = None
                self.node.world.connect(self.node, member.address, hello, up, failed)

        def failed(_: str) -> None:
            self.node.later(RETRY_S, again)

        again()

    # ---- effects ----

    def _handle(self, index: int, event: shard_events.Event) -> None:
        self._run(self.machine.handle(index, event))

    def _ticket(self, index: int, content: Content) -> int:
        self._last_ticket += 1
        self._tickets[self._last_ticket] = (index, content)
        return self._last_ticket

    def _payload(self, ticket: int) -> Content:
        """It leaves here: a ticket that is used a second time is not found."""
        return self._tickets.pop(ticket)[1]

    def _run(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Answer(link=wire, shard=shard, version=version):
                    wire.send(1, ("ack", shard, version, self.shell.fence.number))
                case machine.Own(shard=shard):
                    self.held[shard] = Held()
                case machine.Disown(shard=shard):
                    del self.held[shard]
                    self._tickets = {t: (index, c) for t, (index, c) in self._tickets.items() if index != shard}
                case machine.Restore():
                    self._restore_later(effect, self.shell.fence.generation)
                case Tell(step=step, measures=measures):
                    for wire in self.shell.peers.values():
                        wire.send(0, ("measures", self.shell.fence.number, step, measures))
                case Verdict():
                    self._decide_later(effect)
                case machine.On(shard=shard, effect=on):
                    self._run_on(shard, self.held[shard], on)

    def _decide_later(self, verdict: Verdict) -> None:
        """It waits in the inbox behind what came before: a view, perhaps."""

        def decide() -> None:
            effects, now = self.shell.decided(verdict), self.shell.fence.generation
            assert not effects or verdict.generation == now, f"{self.node.name}: {verdict} is taken in generation {now}"
            self._run(effects)

        self.node.later(self.node.world.random.uniform(0.0, self.decision_s), decide)

    def _restore_later(self, effect: machine.Restore, generation: ViewNumber) -> None:
        """Real servers restore at once: what belongs to a generation that is over by then would never have been."""

        def restore() -> None:
            for index in effect.shards:
                if not self.shell.wants_state(index, generation):
                    continue
                version, (content, clocks, states) = self.store.read(effect.origin, index)
                if self._codec_states is not None:
                    self._codec_states.restored(index, states, generation)
                self.held[index].master = State(content) if self.job.averages(index) else content
                self.held[index].keep(version, version)
                self._run(self.shell.restored(index, generation, shard_events.Loaded(version, clocks)))

        self.node.later(self.node.world.latency() * 4, restore)

    def _run_on(self, index: int, held: Held, effect: shard_effects.Effect) -> None:
        match effect:
            case shard_effects.Install(ticket=ticket, version=version):
                content = self._payload(ticket)
                held.master = State(content) if self.job.averages(index) else content
                held.keep(version, version)
            case shard_effects.Take(ticket=ticket):
                held.sum = server_checks.decoded(self, index, self._payload(ticket))
            case shard_effects.Add(ticket=ticket):
                held.sum = self.job.add(held.sum, server_checks.decoded(self, index, self._payload(ticket)))
            case shard_effects.Drop(ticket=ticket, fault=fault):
                self._payload(ticket)
                assert not fault, f"{self.node.name}: shard {index}: {fault}"
            case shard_effects.Finish(step=step, total_weight=total, measure=measure, not_finite=not_finite):
                held.sum = self.job.mean(held.sum, total)
                if measure and index not in self.job.buffer_shards:
                    fact = Measure(index, self.job.norm(index, held.sum), not_finite)
                    self._run(self.machine.measured(step, fact))
            case shard_effects.Apply():
                self._apply(index, held, effect)
            case shard_effects.Publish(version=version):
                server_checks.check_published(self, index, version)
                for wire in self.shell.followers:
                    self._send_version(wire, index, version)
            case shard_effects.Reply():
                self._reply(index, effect)
            case shard_effects.Wait(follower=follower, replica=replica, clock=clock):
                self.shell.workers[follower].send(1, ("wait", self.shell.fence.number, replica, clock))
            case shard_effects.Fill(version=version):
                state = (version, held.master, tuple(held.wire.items()), self._clocks(index))
                self.shell.fill(index).send(0, ("state", self.shell.fence.number, index, *state))
            case shard_effects.CaughtUp():
                self.membership.send(("in step", {index: self.machine.caught_up[index]}))
            case shard_effects.Capture(version=version, missed=True):
                self.membership.send(("snapshot lost", self._snapshot, "too late", version))
            case shard_effects.Capture(version=version):
                record = (self._snapshot, version, held.master, self._clocks(index))
                if self._codec_states is None or not self._codec_states.awaited(index, version, record):
                    self._write(index, record, {})
            case shard_effects.Gather():
                self.node.later(0.002, lambda: self._handle(index, shard_events.Fold()) if index in self.held else None)
            case shard_effects.Hold() | shard_effects.Abandon() | shard_effects.Acknowledge():
                pass  # a name needs no credit and no buffer; acknowledgements come as answers

    def _clocks(self, index: int) -> tuple[int, ...]:
        machine = self.machine.machine(index)
        return tuple(machine.clocks) if machine is not None else ()

    def _apply(self, index: int, held: Held, apply: shard_effects.Apply) -> None:
        self.applied.append((index, apply.step))
        if self._codec_states is not None:
            self._codec_states.complete(index, at_last=True)
        shard = self.machine.machine(index)
        if shard is not None and shard.primary and shard.decides:
            server_checks.check_alike(self, index, apply.step, apply.scale)
        averages = self.job.averages(index)
        if apply.scale is not None:
            held.sum = self.job.scaled(held.sum, apply.scale)
            held.master = Mean(held.sum) if averages else self.job.update(held.master, held.sum, apply.step)
        elif averages:
            held.master = Mean(None)
        if apply.replicate:
            update = (apply.version - 1, apply.scale is None, held.sum, apply.replica, apply.rate)
            self.shell.backup_link(index).send(0, ("replicate", self.shell.fence.number, index, *update))
        held.keep(apply.version, apply.oldest)

    def _send_version(self, wire: Wire, index: int, version: int) -> None:
        content = self.held[index].wire[version]
        wire.send(1, ("version", self.shell.fence.number, index, version, content, 0, 0))

    def _reply(self, index: int, reply: shard_effects.Reply) -> None:
        content = self.held[index].wire[reply.version]
        server_checks.check_published(self, index, reply.version)
        server_checks.check_read(self, index, reply, content)
        version = ("version", self.shell.fence.number, index, reply.version, content, reply.replica, reply.clock)
        self.shell.workers[reply.follower].send(1, version)

    def _write(self, index: int, record: tuple[str, int, Content, tuple[int, ...]], states: States) -> None:
        id, version, content, clocks = record

        def write() -> None:
            if self.store.write(id, index, version, (content, clocks, states)):
                self.membership.send(("captured", id, (index,)))
            else:
                self.membership.send(("snapshot lost", id, "no space left", -1))

        self.node.later(self.node.world.latency() * 2, write)

    # ---- afterwards ----

    def check_tickets(self) -> None:
        """No payload is forgotten: each one that is still here waits for its turn."""
        held = {index: self.machine.machine(index) for index in self.machine.held}
        waiting = sum(len(m._held) for m in held.values() if m is not None)
        assert waiting == len(self._tickets), f"{self.node.name}: {len(self._tickets)} payloads, {waiting} of use"
