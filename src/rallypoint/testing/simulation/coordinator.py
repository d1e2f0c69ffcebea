"""A simulated coordinator: the real machine, and a journal that outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rallypoint.core.cluster import effects as cluster_effects
from rallypoint.core.cluster import events as cluster_events
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Phase
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.view import Member
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import COORDINATOR
from rallypoint.testing.simulation.network import Node, Wire, World
from rallypoint.testing.simulation.store import SimulatedStore
from rallypoint.testing.simulation.watch import watch

TICK_S = 0.25


@dataclass
class Disk:
    """What a coordinator leaves to the next."""

    state: ClusterState | None = None


@dataclass
class Outcome:
    """How the job ended."""

    finished: bool = False
    aborted: str = ""
    said: list[str] = field(default_factory=list)
    computed: list[tuple[str, int, int]] = field(default_factory=list)


class SimulatedCoordinator:
    """One coordinator process."""

    def __init__(
        self, world: World, job: SimulatedJob, terms: Terms, store: SimulatedStore, disk: Disk, outcome: Outcome
    ) -> None:
        self.node, self.job, self.store, self.disk, self.outcome = Node(world, COORDINATOR), job, store, disk, outcome
        self.machine = watch(ClusterMachine(terms, recovered=disk.state), COORDINATOR)
        self._written = 0
        self._members: dict[str, Wire] = {}
        world.acceptors[COORDINATOR] = self
        self._write()
        self._tick()

    @property
    def _time(self) -> float:
        return self.node.world.now + 1.0  # 0 is no time to the machine

    def _tick(self) -> None:
        self._handle(cluster_events.Tick(self._time))
        self.node.later(TICK_S, self._tick)

    def accept(self, wire: Wire, hello: Any) -> str:
        role, who, address, incarnation = hello
        if self.machine.phase is Phase.OVER:
            return "the job is over"
        old = self._members.get(who)
        if old is not None:
            old.close(1)
        self._members[who] = wire
        wire.on_message[1] = lambda message: self._receive(wire, who, message)
        wire.on_close[1] = lambda: self._lost(wire, who)
        self._handle(cluster_events.Joined(Member(who, "host", address, incarnation), role))
        return ""

    def _lost(self, wire: Wire, who: str) -> None:
        if self._members.get(who) is wire:
            del self._members[who]
            self._handle(cluster_events.Left(who, "its connection ended"))

    def _receive(self, wire: Wire, who: str, message: Any) -> None:
        if self._members.get(who) is not wire:
            return
        match message:
            case ("beat",):
                self._handle(cluster_events.Heard(who))
            case ("propose", record):
                self._handle(cluster_events.Proposed(who, record))
            case ("progress", step, replica, seconds, generation):
                self.outcome.computed.append((who, step, replica))
                self._handle(cluster_events.Progress(who, step, replica, seconds, generation, self._time))
            case ("in step", backups):
                self._handle(cluster_events.CaughtUp(who, backups))
            case ("leaving",):
                self._handle(cluster_events.Leaving(who))
            case ("done", generation):
                self._handle(cluster_events.Done(who, generation))
            case ("captured", id, indices):
                self._handle(cluster_events.Captured(who, id, indices))
            case ("snapshot lost", id, reason, passed):
                self._handle(cluster_events.SnapshotLost(id, reason, passed))

    def _handle(self, event: cluster_events.Event) -> None:
        revision = self.machine.revision
        effects = self.machine.handle(event)
        self._write()
        over = self.machine.phase is Phase.OVER
        if self.machine.revision != revision and not over and self.node.world.spring("half said"):
            self._run(effects[: self.node.world.random.randint(0, len(effects))])
            self.node.kill()  # what it has written down is all that the next one knows
        else:
            self._run(effects)

    def _write(self) -> None:
        if self.machine.revision != self._written:
            self._written = self.machine.revision
            self.disk.state = self.machine.state()

    def _run(self, effects: Sequence[cluster_effects.Effect]) -> None:
        for effect in effects:
            match effect:
                case cluster_effects.Refuse(member=member):
                    if member in self._members:
                        self._members.pop(member).cut()
                case cluster_effects.Admit(member=member, incarnation=incarnation):
                    self._send(member, ("admit", incarnation))
                case cluster_effects.Prepare(server=server, record=record):
                    self._send(server, ("prepare", record))
                case cluster_effects.Publish(view=view, members=members):
                    for member in members:
                        self._send(member, ("view", view))
                case cluster_effects.Assist(worker=worker, step=step, replica=replica):
                    self._send(worker, ("assist", step, replica))
                case cluster_effects.Capture(snapshot=id, version=version, writers=writers):
                    for writer in writers:
                        self._send(writer, ("capture", id, version, writers))
                case cluster_effects.Commit():
                    self.node.later(self.node.world.latency() * 2, lambda e=effect: self._commit(e))  # type: ignore[misc]
                case cluster_effects.FindSnapshot():
                    self.node.later(self.node.world.latency(), self._find)
                case cluster_effects.Say(text=text):
                    self.outcome.said.append(f"{self.node.world.now:.2f} {text}")
                case cluster_effects.Finish():
                    self.outcome.finished = True
                case cluster_effects.Abort(reason=reason):
                    self.outcome.aborted = reason

    def _send(self, member: str, message: Any) -> None:
        if member in self._members:
            self._members[member].send(1, message)

    def _commit(self, effect: cluster_effects.Commit) -> None:
        if self.store.commit(effect.snapshot, effect.version, self._versions(effect.version)):
            self._handle(cluster_events.Committed(effect.snapshot))
        else:
            self._handle(cluster_events.SnapshotLost(effect.snapshot, "no space left"))

    def _versions(self, version: int) -> list[int | None]:
        """What the store must hold of each shard; None where no version is common to all."""
        shards = range(self.job.shards)
        return [None if self.job.policy.streaming else self.job.cadence.updates_before(s, version) for s in shards]

    def _find(self) -> None:
        self._handle(cluster_events.Found(*self.store.newest()))
