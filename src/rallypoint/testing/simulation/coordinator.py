"""A simulated coordinator: the real machine and the real shell, and a journal that outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.coordinator import acts, inbox
from rallypoint.coordinator.owner import tick_seconds
from rallypoint.coordinator.shell import CoordinatorShell
from rallypoint.core.cluster.effects import FindSnapshot
from rallypoint.core.cluster.events import SnapshotFound, SnapshotLost
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Resumed
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.placing.links import MeasuredLinks
from rallypoint.core.plan.measured import LinkSpeeds
from rallypoint.core.protocol import Aborted, Finished, Hello, Message, Metrics, Report, Say
from rallypoint.core.view import ViewNumber
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import COORDINATOR
from rallypoint.testing.simulation.network import Node, Wire, World, watch
from rallypoint.testing.simulation.operating.copies import CopiesWatch
from rallypoint.testing.simulation.store import SimulatedStore


@dataclass
class Disk:
    """What a coordinator leaves to the next. While it is `full`, nothing can be written; `started`: how many began."""

    state: ClusterState | None = None
    full: bool = False
    started: int = 0


@dataclass
class Outcome:
    """How the job ended. `paused`: before which step, in which generation. `copies`: of each shard, on servers."""

    finished: bool = False
    aborted: str = ""
    said: list[str] = field(default_factory=list)
    computed: list[tuple[str, int, int]] = field(default_factory=list)
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    paused: set[tuple[ViewNumber, int]] = field(default_factory=set)
    copies: CopiesWatch = field(default_factory=CopiesWatch)


class SimulatedCoordinator:
    """One coordinator process."""

    def __init__(
        self, world: World, job: SimulatedJob, terms: Terms, store: SimulatedStore, disk: Disk, outcome: Outcome,
        resume: Resumed | None = None,
    ) -> None:  # fmt: skip
        self.node, self.job, self.store, self.disk, self.outcome = Node(world, COORDINATOR), job, store, disk, outcome
        self._tick_s = tick_seconds(terms)
        self._unsaved: ClusterState | None = None
        terms = msgspec.structs.replace(terms, earlier=disk.started)
        disk.started += 1
        self.shell = CoordinatorShell(terms, self._time, recovered=disk.state, resume=resume)
        if terms.measure_links:  # a simulated job takes a few seconds: shards move soon, and often
            links = MeasuredLinks(LinkSpeeds(least=1.0), settle_s=0.0, rest_s=0.3)
            self.shell.machine.course.links = links
        watch(self.shell.machine, COORDINATOR)
        world.acceptors[COORDINATOR] = self
        self._do(self.shell.start())
        self._tick()

    @property
    def machine(self) -> ClusterMachine:
        """The machine in the shell."""
        return self.shell.machine

    @property
    def _time(self) -> float:
        return self.node.world.now + 1.0  # 0 is no time to the machine

    def _write(self) -> None:
        self.disk.state, self._unsaved = self._unsaved, None

    def _tick(self) -> None:
        self._handle(inbox.Ticked())
        if self._unsaved is not None and not self.disk.full:
            self._write()
        self.node.later(self._tick_s, self._tick)

    # ---- connections ----

    def accept(self, wire: Wire, hello: Hello) -> str:
        wire.on_message[1] = lambda message: self._receive(wire, hello, message)
        wire.on_close[1] = lambda: self._handle(inbox.Closed(wire, hello, "its connection ended", wire.ended))
        self._handle(inbox.Opened(wire, hello))
        return ""

    def _receive(self, wire: Wire, hello: Hello, message: Message) -> None:
        if isinstance(message, Report) and self.shell.members.get(hello.id) is wire:
            done = (hello.id, message.step, message.replica)
            if not (message.repeated and done in self.outcome.computed):
                self.outcome.computed.append(done)
        self._handle(inbox.Received(wire, hello, message))

    # ---- acts ----

    def _handle(self, event: inbox.Event) -> None:
        todo = self.shell.handle(event, self._time)
        self.outcome.copies.look(self.machine)
        if (view := self.machine.view) is not None and view.orders.paused is not None:
            self.outcome.paused.add((view.generation, view.orders.paused))
        saved = any(isinstance(act, acts.Save) for act in todo)
        if saved and self.shell.last_word is None and self.node.world.spring("half said"):
            first = next(i for i, act in enumerate(todo) if isinstance(act, acts.Save))
            self._do(todo[: self.node.world.random.randint(first + 1, len(todo))])
            self.node.kill()  # what it has written down is all that the next one knows
        else:
            self._do(todo)

    def _do(self, todo: Sequence[acts.Act]) -> None:
        for act in todo:
            match act:
                case acts.Save(state=state, needed=needed):
                    self._unsaved = state
                    if needed or not self.disk.full:
                        self._write()
                case acts.SendMessage(connection=Wire() as wire, message=message):
                    if isinstance(message, Finished) and self.shell.last_word is None:
                        self._check_dismissed(wire)
                    wire.send(1, message)
                case acts.RefuseConnection(connection=Wire() as wire) | acts.Close(connection=Wire() as wire):
                    wire.cut() if isinstance(act, acts.RefuseConnection) else wire.close(1)
                case acts.AppendLog(message=message):
                    self._note(message)
                case acts.CommitSnapshot():
                    self.node.later(self.node.world.latency() * 2, lambda act=act: self._commit(act))  # type: ignore[misc]
                case FindSnapshot():
                    self.node.later(self.node.world.latency(), self._find)
                case _:
                    pass

    def _check_dismissed(self, wire: Wire) -> None:
        """A server that may go was told to go, and the view has no shard on it."""
        server = next(name for name, of in self.shell.members.items() if of is wire)
        view, members = self.machine.view, self.machine.course.members
        assert view is not None
        assert server in members.leaving, f"{server} is dismissed, and was not told to go"
        held = server in view.holders and not self.job.stateful_workers
        assert not held, f"{server} is dismissed, and has shards in view {view.number}"

    def _note(self, message: object) -> None:
        match message:
            case Say(text=text):
                self.outcome.said.append(f"{self.node.world.now:.2f} {text}")
                self.node.world.tell(f"coordinator: {text}")
            case Metrics(step=step, values=values):
                self.outcome.evaluated.append((step, values["figure"]))
            case Finished():
                self.outcome.finished = True
            case Aborted(reason=reason):
                self.outcome.aborted = reason

    def _commit(self, act: acts.CommitSnapshot) -> None:
        known = (act.stop, act.decided)
        if self.store.commit(act.snapshot, act.version, self._versions(act.version), known, act.origin):
            self._handle(inbox.SnapshotCommitted(act.snapshot, act.version, 0, 0.0))
        else:
            self._handle(SnapshotLost(act.snapshot, "no space left"))

    def _versions(self, version: int) -> list[int | None]:
        """What the store must hold of each shard; None where no version is common to all."""
        shards = range(self.job.shards)
        any_version = self.job.policy.streaming or self.job.config.keyed
        return [None if any_version else self.job.cadence.updates_before(s, version) for s in shards]

    def _find(self) -> None:
        self._handle(SnapshotFound(*self.store.newest()))
