"""A simulated server: the real machine and the real shell; names where tensors would be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rallypoint.core.protocol import Beat, Disproved, Finished
from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard import server as machine
from rallypoint.core.shard.clip import Measure, StepVerdict, Tell
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.shard.shell import Answer, PeerLinks, ServerShell
from rallypoint.core.view import View, ViewNumber
from rallypoint.server.job import plan_of
from rallypoint.server.parts import AuditReports
from rallypoint.server.service import LEAVING_EVERY_S
from rallypoint.testing.simulation import server_checks
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import SimulatedMembership
from rallypoint.testing.simulation.network import Node, PeerWires, Wire, World, watch
from rallypoint.testing.simulation.pulls import ServerPulls
from rallypoint.testing.simulation.replicas import scale as loss_scale
from rallypoint.testing.simulation.replicas.codec_states import Coded, Residual, ServerCodecStates, States
from rallypoint.testing.simulation.replicas.contents import Content, Mean, State, with_digest
from rallypoint.testing.simulation.replicas.script import rate_in
from rallypoint.testing.simulation.server_checks import HeldNames
from rallypoint.testing.simulation.store import SimulatedStore

Effects = Iterable[machine.Effect | Answer[Wire]]


class SimulatedServer:
    """One server process. `decision_s`: a verdict waits in its inbox for up to so long."""

    decision_s = 0.004

    def __init__(self, world: World, name: str, job: SimulatedJob, store: SimulatedStore) -> None:
        self.node, self.job, self.store = Node(world, name), job, store
        plan = plan_of(job.config, job.layout.shards)
        self.machine = watch(ServerMachine(name, plan), name)
        self.shell: ServerShell[Wire] = ServerShell(self.machine)
        self.held: dict[int, HeldNames] = {}
        self._ledger = server_checks.SimulatedLedger(self)
        self.decided: dict[tuple[ViewNumber, int], tuple[int, float | None]] = {}  # shard and scale by step
        self.used: dict[tuple[ViewNumber, int, int, int], int] = {}  # generation, shard, replica, state -> step
        self._peers = PeerWires(self.node, PeerLinks(name, decides=bool(plan.decides)), self.shell, self._run)
        self._waiting: deque[tuple[ViewNumber, Callable[[], None]]] = deque()
        self._tickets: dict[int, tuple[int, Content]] = {}  # shard and payload
        self._last_ticket = 0
        self._snapshot = ""
        self.leaving = False
        self._pulls, self._running = ServerPulls(job), 0
        self._codec_states = ServerCodecStates(name, job, self._tell, self._write) if job.codec_state_shards else None
        world.acceptors[name] = self
        self._audits = AuditReports(lambda found: self.membership.send(found), self.shell.fence)
        self.membership = SimulatedMembership(
            self.node, "server", self._on_message, self._on_admitted, name,
            lambda: Beat(self._peers.unreachable()),
        )  # fmt: skip

    # ---- the coordinator's words ----

    def _on_admitted(self, new: bool) -> None:
        for shards in self.shell.say_again(new=new):
            self.membership.send(("in step", shards))
        if not new:
            self._ledger.repeat()
            self._audits.repeat()
            self._run(self.machine.report_again())

    def leave(self) -> None:
        """SIGTERM: it hands its shards over. It says so again: a coordinator that takes over has not heard it."""
        self.leaving = True
        self.membership.send(("leaving",))
        self.node.later(LEAVING_EVERY_S, self.leave)

    def crashes(self) -> None:  # it is about to be killed
        if self._codec_states is not None:
            self._codec_states.crashed()

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
        self._ledger.proves()
        self._peers.adopt(view)
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

        def gone() -> None:
            self._pulls.gone(wire)
            self._run(self.shell.gone(wire, who))

        wire.on_close[1] = gone
        if role != "server":
            older, effects = self.shell.workers.get(who), self.shell.linked(wire, who)
            if effects is not None and older is not None:
                older.close(1)
            self._run(effects or [])
        return ""

    def _take(self, wire: Wire, who: str, message: Any) -> None:
        server_checks.check_current(self, who, message)
        shell = self.shell
        match message:
            case ("push", number, shard, step, replica, count, content, base, wants) if shell.takes(shard, number):
                if not shell.may_contribute(who, replica, count, step):
                    self._run([] if wants is None else shell.want(wire, who, shard, wants))
                    return
                if self._codec_states is not None and isinstance(content, Coded):
                    self._codec_states.contributed(shard, content, who, self._upcoming(shard, replica))
                ticket = self._ticket(shard, content)
                flags = [self.job.flags(shard, step, r) for r in range(replica, replica + count)]
                finite, whole = all(flag[0] for flag in flags), all(flag[1] for flag in flags)
                event = shard_events.Contribute(step, replica, float(count), ticket, finite, base, whole, count)
                self._handle(shard, with_digest(self.job, event, who, content))
                if wants is not None:
                    self._run(shell.want(wire, who, shard, wants))
            case ("want", _, shard, replica):
                self._run(shell.want(wire, who, shard, replica))
            case ("pull", *_):
                self._pulls.add(wire, message)
                self._run(())
            case ("initial", number, shard, content, version) if shell.takes(shard, number) and shell.may_begin(who):
                self._handle(shard, shard_events.Initialise(self._ticket(shard, content), version))
            case ("follow", _, False, _):
                shell.unfollow(wire)
            case ("follow", _, True, _):
                for index, version in shell.follow(wire):
                    self._send_version(wire, index, version)
            case ("fetch", _, shard, version) if shell.may_see(shard, version) and version in self.held[shard].wire:
                self._send_version(wire, shard, version)
            case ("give", number, shard, replica, state) if self._codec_states is not None:
                if shell.takes(shard, number):
                    known = state if shell.may_contribute(who, replica, 1) else None
                    self._codec_states.given(shard, replica, known, who, self._upcoming(shard, replica))
            case ("copy", number, shard, replica, Residual() as state) if self._codec_states is not None:
                if shell.takes(shard, number) and shell.may_contribute(who, replica, 1):
                    self._codec_states.copied(shard, replica, state)
            case ("recall", _, shard, replica) if self._codec_states is not None:
                current = shell.is_current(wire, who) and self.machine.is_primary(shard)
                if current and shell.may_contribute(who, replica, 1):
                    self._codec_states.recalled(shard, replica, who, self._upcoming(shard, replica))
            case ("measures", number, step, measures):
                self._run(shell.told(step, measures, number))
            case ("replicate", number, shard, step, skip, content, replica, rate):
                if shell.takes_from(shard, who, number):
                    update = shard_events.Replicated(step, skip, self._ticket(shard, content), replica, rate)
                    self._run(shell.replicated(wire, shard, update))
            case ("choice", number, shard, step, replicas) if shell.takes_from(shard, who, number):
                self._run(shell.replicated(wire, shard, shard_events.Chosen(step, replicas)))
            case ("prove", number, shard, version, seal) if shell.takes_from(shard, who, number):
                same = shell.holds(shard, version) and hash(self._digest(shard)) == seal
                self._run(shell.replicated(wire, shard, shard_events.Compared(version, same)))
            case ("state", number, shard, version, master, wires, clocks) if shell.takes_from(shard, who, number):
                self.held[shard].master = master
                self.held[shard].wire = dict(wires)
                self._run(shell.replicated(wire, shard, shard_events.Loaded(version, clocks)))
                self._ledger.proves()

    def _upcoming(self, shard: int, replica: int) -> int:
        machine = self.machine.machine(shard)
        assert machine is not None
        return machine.clock(replica) + machine.knows(replica)  # the next step of which it takes a contribution

    def _tell(self, worker: str, message: Any) -> None:
        if (wire := self.shell.workers.get(worker)) is not None:
            wire.send(1, message)

    # ---- effects ----

    def _handle(self, index: int, event: shard_events.Event) -> None:
        self._run(self.machine.handle(index, event))

    def _ticket(self, index: int, content: Content) -> int:
        self._last_ticket += 1
        self._tickets[self._last_ticket] = (index, content)
        return self._last_ticket

    def _payload(self, ticket: int) -> Content:
        return self._tickets.pop(ticket)[1]  # a ticket that is used a second time is not found

    def _run(self, effects: Effects) -> None:
        """Run the effects of an event; then answer the pulls: meanwhile a machine is ahead of what is held."""
        self._running += 1
        for effect in effects:
            match effect:
                case Answer(link=wire, shard=shard, version=version, chosen=chosen):
                    acked, digest = shard_events.Acked(version, chosen), self._digest(shard)
                    wire.send(1, ("ack", shard, acked, self.shell.fence.number, "" if effect.differs else digest))
                case machine.TellDisproved():
                    self.membership.send(Disproved(effect.shard, effect.version, effect.paired))
                case machine.Own(shard=shard):
                    self.held[shard] = HeldNames()
                case machine.Disown(shard=shard):
                    del self.held[shard]
                    self._tickets = {t: (index, c) for t, (index, c) in self._tickets.items() if index != shard}
                case machine.Restore():
                    self._restore_later(effect, self.shell.fence.generation)
                case Tell(step=step, measures=measures):
                    for wire in self.shell.peers.values():
                        wire.send(0, ("measures", self.shell.fence.number, step, measures))
                case StepVerdict():
                    self._decide_later(effect)
                case machine.TellNotFinite(verdict=verdict):
                    server_checks.report(self, verdict)
                case machine.On(shard=shard, effect=shard_effects.Accepted() | shard_effects.Disputed() as found):
                    self._audits.found(shard, found)
                case machine.On(shard=shard, effect=on):
                    self._run_on(shard, self.held[shard], on)
        self._running -= 1
        if not self._running:
            self._pulls.answer(self.machine.machine, lambda shard: self.held[shard].wire)

    def _decide_later(self, verdict: StepVerdict) -> None:
        """It waits in the inbox behind what came before: a view, perhaps."""

        if verdict.stops:
            server_checks.report(self, verdict)

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

    def _run_on(self, index: int, held: HeldNames, effect: shard_effects.Effect) -> None:
        match effect:
            case shard_effects.InstallFirst(ticket=ticket, version=version):
                content = self._payload(ticket)
                if index in self.job.table_shards:
                    content = self.job.first(index)
                held.master = State(content) if self.job.averages(index) else content
                held.keep(version, version)
            case shard_effects.Take(ticket=ticket, at=at):
                held.parts[at] = server_checks.decoded(self, index, self._payload(ticket))
            case shard_effects.Merge(left=left, right=right):
                held.parts[left] = self.job.add(held.parts[left], held.parts.pop(right))
            case shard_effects.Discard(at=at):
                del held.parts[at]
            case shard_effects.Add(ticket=ticket):
                held.parts[0] = self.job.add(held.parts[0], server_checks.decoded(self, index, self._payload(ticket)))
            case shard_effects.Drop(ticket=ticket, fault=fault):
                self._payload(ticket)
                assert not fault, f"{self.node.name}: shard {index}: {fault}"
            case shard_effects.Finish(step=step, total_weight=total, measure=measure, not_finite=not_finite):
                held.parts[0] = self.job.mean(held.parts[0], total)
                if measure:
                    norm, at = self.job.look(index, step, held.parts[0])
                    scale = loss_scale.scale_of(held.master) if index == self.job.scale_shard else 0.0
                    fact = Measure(index, (norm,), not_finite, effect.gradients, at, scale)
                    self._run(self.machine.measured(step, fact))
            case shard_effects.Apply():
                self._apply(index, held, effect)
            case shard_effects.Publish(version=version):
                server_checks.check_published(self, index, version)
                for wire in self.shell.followers:
                    self._send_version(wire, index, version, newest=True)
            case shard_effects.Reply():
                self._reply(index, effect)
            case shard_effects.TellWait(follower=follower, replica=replica, clock=clock):
                self.shell.workers[follower].send(1, ("wait", self.shell.fence.number, replica, clock))
            case shard_effects.Choose(step=step, replicas=replicas):
                self._peers.choose(index, step, replicas)
            case shard_effects.Prove(version=version):
                self._peers.fill(index, version, held.master, "prove", hash(held.master))
            case shard_effects.Fill(version=version, incoming=incoming):
                rest = tuple(held.wire.items()), self._clocks(index)
                self._peers.fill(index, version, held.master, "state", held.master, *rest, incoming=incoming)
            case shard_effects.BackupCaughtUp(incoming=incoming):
                known = (self.machine.arrived if incoming else self.machine.caught_up)[index]
                self.membership.send(("in step", {index: known}))
            case shard_effects.CaptureShard(version=version, missed=True):
                self.membership.send(("snapshot lost", self._snapshot, "too late", version))
            case shard_effects.CaptureShard(version=version):
                kept = held.wire[version] if index in self.job.buffer_shards else held.master
                record = (self._snapshot, version, kept, self._clocks(index))
                if self._codec_states is None or not self._codec_states.awaited(index, version, record):
                    self._write(index, record, {})
            case shard_effects.Gather():
                self.node.later(0.002, lambda: self._handle(index, shard_events.Fold()) if index in self.held else None)
            case shard_effects.Hold() | shard_effects.Abandon() | shard_effects.Acknowledge():
                pass  # a name needs no credit and no buffer; acknowledgements come as answers

    def _digest(self, index: int) -> Content:
        return self.held[index].master  # with what it proves that it holds the shard

    def _clocks(self, index: int) -> tuple[int, ...]:
        machine = self.machine.machine(index)
        return tuple(machine.clocks) if machine is not None else ()

    def _apply(self, index: int, held: HeldNames, apply: shard_effects.Apply) -> None:
        round = self.job.cadence.round_of(index, apply.version - 1)
        if self.job.cadence.witness(round) == index:
            self._ledger.enter(round)
        if self._codec_states is not None:
            self._codec_states.complete(index, at_last=True)
        shard = self.machine.machine(index)
        if shard is not None and shard.primary and index in self.machine.plan.decides:
            server_checks.check_alike(self, index, round, apply.scale)
        averages = self.job.averages(index)
        if index == self.job.scale_shard:
            held.master = loss_scale.after(held.master, skipped=apply.scale is None)
        elif apply.scale is not None:
            held.parts[0] = self.job.scaled(held.parts[0], apply.scale)
            update = self.job.update(held.master, held.parts[0], apply.step, rate_in(self.machine.view, apply.step))
            held.master = Mean(held.parts[0]) if averages else update
        elif averages:
            held.master = Mean(None)
        if apply.replicate:
            update = (apply.scale is None, held.parts[0], apply.replica, apply.rate)
            self._peers.replicate(index, apply.copies, apply.version, held.master, *update)
        held.keep(apply.version, apply.oldest, apply.pinned)

    def _send_version(self, wire: Wire, index: int, version: int, *, newest: bool = False) -> None:
        content = self.job.sent(index, self.held[index].wire[version])
        place = ("version", index) if newest and not self.job.stateful_workers else None
        wire.send(1, ("version", self.shell.fence.number, index, version, content, 0, 0), place=place)

    def _reply(self, index: int, reply: shard_effects.Reply) -> None:
        content = self.held[index].wire[reply.version]
        server_checks.check_published(self, index, reply.version)
        server_checks.check_read(self, index, reply, content)
        sent = self.job.sent(index, content)
        version = ("version", self.shell.fence.number, index, reply.version, sent, reply.replica, reply.clock)
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
