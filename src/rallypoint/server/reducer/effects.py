"""Runs the machine's effects, in order, on tensors, channels and the coordinator's link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rallypoint.core.decisions import reductions_at
from rallypoint.core.protocol import CaughtUp, Disproved, NotStored
from rallypoint.core.shard import clip, server
from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard.shell import Answer, ServerShell
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind, wants
from rallypoint.observe.trace import Tracer
from rallypoint.server.audits import AuditReports
from rallypoint.server.capture import Capture
from rallypoint.server.codec_states import CodecStates
from rallypoint.server.followers import Followers
from rallypoint.server.job import ServerJob
from rallypoint.server.reducer.decisions import Context, Decisions
from rallypoint.server.reducer.ledger import Fingerprints, Ledger
from rallypoint.server.reducer.replication import Replication
from rallypoint.server.reducer.tickets import Tickets
from rallypoint.server.restores import Restores
from rallypoint.server.shards.held import HeldShard, ShardFactory

AnyEffect = server.Effect | Answer[Channel]


@dataclass
class ReducerParts:
    """The objects that a reducer's effects are run on, in one job. Not thread-safe: only the owner thread uses it."""

    job: ServerJob
    shell: ServerShell[Channel]
    owned: dict[int, HeldShard]
    factory: ShardFactory
    tickets: Tickets
    ledger: Ledger
    fingerprints: Fingerprints
    audits: AuditReports
    followers: Followers
    replication: Replication
    decisions: Decisions
    context: Context
    tracer: Tracer
    restores: Restores
    codec_states: CodecStates | None
    capture: Capture | None
    gathering: dict[int, None] = field(default_factory=dict)  # shards whose sum may take more from the inbox


class Effects:
    """Runs effects. Call `run`; the other methods each handle a group of effects."""

    def __init__(self, parts: ReducerParts) -> None:
        self._parts = parts
        self._cadence = parts.job.plan.cadence
        self._together = self._cadence.together
        # Looked up once, because every contribution uses them.
        self._owned, self._tickets, self._ledger, self._tracer = parts.owned, parts.tickets, parts.ledger, parts.tracer

    def run(self, effects: Sequence[AnyEffect]) -> None:
        """Run the effects in order."""
        for effect in effects:
            match effect:
                case server.On(shard=index, effect=on):
                    self._run_on(index, self._owned[index], on)
                case Answer():
                    self._parts.replication.acknowledge(effect)
                case clip.Tell():
                    self._parts.decisions.tell(effect)
                case clip.Verdict():
                    self._parts.decisions.decide(effect)
                case server.Report(verdict=verdict):
                    self._parts.decisions.report(verdict, alone=True)
                case server.Disproved(shard=index, version=version, paired=paired):
                    self._parts.context.say(Disproved(index, version, paired))
                case server.Own(shard=index):
                    self._owned[index] = self._parts.factory.allocate(index)
                case server.Disown(shard=index):
                    self._disown(index)
                case server.Restore(shards=indices, origin=origin):
                    self._parts.restores.begin(indices, origin, self._parts.shell.fence.generation)

    def handle(self, index: int, event: shard_events.Event) -> None:
        """Handle an event for one shard, and run its effects."""
        self.run(self._parts.shell.machine.handle(index, event))

    def _run_on(self, index: int, owned: HeldShard, effect: shard_effects.Effect) -> None:
        match effect:
            case shard_effects.Take():
                buffer = self._tickets.settle(effect.ticket, early=effect.at if effect.early else None)
                owned.take(buffer, effect.weight if effect.count == 1 else 1.0, effect.base, effect.at)
            case shard_effects.Merge(left=left, right=right):
                with self._tracer.span("reduce", shard=index):
                    owned.merge(left, right)
            case shard_effects.OnTime(at=at):
                self._tickets.on_time(index, at)
            case shard_effects.Add(ticket=ticket, weight=weight, base=base):
                with self._tracer.span("reduce", shard=index):
                    owned.add(self._tickets.settle(ticket), weight, base)
            case shard_effects.Hold(ticket=ticket, credit=credit):
                self._tickets.hold(ticket, always=credit)
            case shard_effects.Drop(ticket=ticket, fault=fault):
                self._tickets.drop(ticket, fault)
            case shard_effects.Finish():
                self._ledger.finished(index, effect.replicas)
                owned.mean(effect.total_weight)
                self.run(self._parts.decisions.measured(owned, effect))
            case shard_effects.Apply():
                self._apply(index, owned, effect)
            case shard_effects.Publish(version=version):
                self._parts.followers.publish(index, version)
            case shard_effects.Reply():
                self._parts.followers.reply(index, effect)
            case shard_effects.Gather():
                self._parts.gathering[index] = None
            case _:
                self._run_rare(index, owned, effect)

    def _run_rare(self, index: int, owned: HeldShard, effect: shard_effects.Effect) -> None:
        parts = self._parts
        match effect:
            case shard_effects.Install(ticket=ticket, version=version):
                nbytes = self._tickets.nbytes(ticket)
                owned.install(self._tickets.settle(ticket), version, nbytes)
            case shard_effects.Discard(at=at):
                owned.discard(at)
            case shard_effects.Abandon():
                self._tickets.all_on_time(index)
                owned.abandon()
            case shard_effects.Choose():
                parts.replication.send_choice(index, effect)
            case shard_effects.Prove(version=version):
                parts.replication.ask(index, version)
            case shard_effects.Fill(version=version, incoming=incoming):
                state = owned.state(version, self._clocks(index), wires=True)
                parts.replication.send_state(state, incoming=incoming)
            case shard_effects.Wait(follower=follower, replica=replica, clock=clock):
                wait = Header(Kind.WAIT, shard=index, base=clock, wants=wants(replica))
                parts.followers.tell(follower, wait, urgent=True)
            case shard_effects.Accepted() | shard_effects.Disputed():
                parts.audits.found(index, effect)
            case shard_effects.CaughtUp(incoming=incoming):
                machines = parts.shell.machine
                parts.context.say(CaughtUp({index: (machines.arrived if incoming else machines.caught_up)[index]}))
            case shard_effects.Capture(version=version, missed=missed):
                assert parts.capture is not None
                if missed:
                    too_late = "the step was over before the request came"
                    parts.context.say(NotStored(parts.capture.snapshot, too_late, version))
                else:
                    parts.capture.wanted(index, version)
            case _:
                raise AssertionError(f"an effect that nobody runs: {effect}")

    def _apply(self, index: int, owned: HeldShard, effect: shard_effects.Apply) -> None:
        parts = self._parts
        if parts.capture is not None:
            parts.capture.before_update(index)
        parts.gathering.pop(index, None)
        with self._tracer.span("apply", shard=index, step=effect.step):
            finished = owned.apply(self._timed(index, effect))
        parts.fingerprints.applied(index, effect.version, owned)
        if self.in_ledger(index, effect.version - 1):
            self._enter(index, self._cadence.round_of(index, effect.version - 1))
        if finished is not None:
            parts.replication.send_update(index, effect, finished)

    def _timed(self, index: int, effect: shard_effects.Apply) -> shard_effects.Apply:
        """The update, with its step in the learning-rate schedule counted in the job's rounds, and the reductions that
        count for it: this server has the view that says them (see `View.reductions`)."""
        view = self._parts.shell.machine.view
        if view is not None and view.reductions:
            effect = replace(effect, reductions=reductions_at(view.reductions, effect.step))
        if self._together:
            return effect
        return replace(effect, step=self._cadence.round_of(index, effect.step))

    def in_ledger(self, index: int, version: int) -> bool:
        """Is this shard the one whose update from that version is reported for its round?"""
        return index == 0 if self._together else self._cadence.witness(self._cadence.round_of(index, version)) == index

    def _enter(self, index: int, step: int) -> None:
        """Report a round, for the first shard that is due in it. Primary and backup both do: one of them may die."""
        machines = self._parts.shell.machine
        self._ledger.enter(index, step, primary=machines.is_primary(index), norm=self._parts.decisions.norm(step))
        machine = machines.machine(0)
        if machine is not None and machine.primary and self._parts.job.accounts:
            self._ledger.account(machine, step, self._parts.job.config.rounds)

    def _disown(self, index: int) -> None:
        self._tickets.drop_all(index)
        if self._parts.capture is not None:
            self._parts.capture.disowned(index)
        self._parts.gathering.pop(index, None)
        self._owned.pop(index).release()

    def _clocks(self, index: int) -> tuple[int, ...]:
        machine = self._parts.shell.machine.machine(index)
        return tuple(machine.clocks) if machine is not None else ()
