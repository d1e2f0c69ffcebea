"""A simulated worker's data plane: the real shell, links that come back, slots that hold names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rallypoint.core.sums import Part
from rallypoint.core.view import View
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.factory import shell_for
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Node, SimulatedLink, Wire, watch
from rallypoint.testing.simulation.replicas.codec_states import SimulatedEncoder
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Content, Mean
from rallypoint.worker.exchange.arrivals import RowPull
from rallypoint.worker.exchange.exchange import worker_plan

_NO_BYTES = (memoryview(b""), 0)  # names are as long as nothing


class SimulatedRowPulls:
    """One worker's pull. `send(server, message)` sends to a server, or nowhere if its link is lost."""

    def __init__(self, job: SimulatedJob, shell: WorkerShell, send: Callable[[str, Any], None]) -> None:
        self._job, self._shell, self._send = job, shell, send
        self._pull: RowPull | None = None
        self._pulls = 0
        self._got: dict[int, Content] = {}
        self._replica = -1

    def begin(self, replica: int, shards: Iterable[int]) -> None:
        """The forward pass of the replica in progress needs rows of these parts of tables."""
        self._pulls += 1
        self._replica = replica
        self._pull = RowPull.of(
            self._pulls, self._shell.machine, dict.fromkeys(shards, _NO_BYTES),
            newest=not self._shell.machine.computing,
        )  # fmt: skip

    def whole(self, version: int) -> None:
        """All shards are needed at a version that is to be evaluated, and may not exist yet."""
        self._pulls += 1
        self._replica = -1
        wanted = dict.fromkeys(range(self._job.shards), _NO_BYTES)
        own = {shard: self._job.cadence.updates_before(shard, version) for shard in wanted}
        self._pull = RowPull(self._pulls, version, False, wanted, own=own)

    def whole_model(self) -> list[Content]:
        """What has come of all shards."""
        return [content for _, content in sorted(self._got.items())]

    @property
    def outdated(self) -> bool:
        """Do the servers not keep the step in progress any more?"""
        return self._pull is not None and self._pull.outdated

    def ready(self) -> bool:
        """Is there nothing (more) to wait for? If there is, ask whoever was not asked yet."""
        pull, shell = self._pull, self._shell
        if pull is None or pull.over:
            return True
        for shard in list(pull.unasked(shell.number, shell.view.primary, shell.links.connections)):
            home = shell.view.primary[shard]
            pull.ask(shard, shell.number, home, shell.links.connections[home])
            asked = (pull.version_of(shard), pull.newest, pull.number, shell.machine.step, self._replica)
            self._send(home, ("pull", shell.number, shard, *asked))
        return False

    def end(self) -> None:
        """The replica is over, or stale."""
        self._pull, self._got = None, {}

    def arrived(self, shard: int, number: int, content: Content, *, outdated: bool) -> None:
        """A server has answered."""
        taken = self._pull is not None and self._pull.answered(shard, number, bytearray(), outdated=outdated)
        if taken and not outdated:
            self._got[shard] = content

    def seen(self, model: Sequence[Content]) -> list[Content]:
        """What the replica computes with: the model, and of tables what was pulled."""
        tables = self._job.table_shards
        return [self._got.get(shard, self._job.nothing) if shard in tables else c for shard, c in enumerate(model)]


class SimulatedExchange:
    """`changed` is called after every event: whatever the main thread waits for may be there."""

    def __init__(self, node: Node, job: SimulatedJob, changed: Callable[[], None]) -> None:
        self.node, self.job, self._changed = node, job, changed
        self.shell = shell_for(node.name, worker_plan(job.config, job.layout, job.codec_state_shards))
        self.encoder = SimulatedEncoder(job, self.shell, self._say)
        self.rows = SimulatedRowPulls(job, self.shell, self._say)
        watch(self.shell.machine, node.name)
        self.machine = self.shell.machine
        self.slots: list[Content] = [GARBAGE] * job.shards
        self._kept: dict[tuple[int, int], Content] = {}  # what is added up, by shard and first replica
        self.fetched = 0
        self.links: dict[str, SimulatedLink] = {}
        self._leaves: dict[Wire, float] = {}  # when the last contribution queued for it will
        self._landing: dict[Wire, deque[Any]] = {}  # what has come behind a version that is being received

    def adopt(self, view: View) -> None:
        """A new view has come."""
        if (ended := self.shell.links_to_end(view)) is None:
            return
        for server in ended:
            self.links.pop(server).close()
        self.apply(self.shell.adopt(view, ended))
        for member in self.shell.links.to_open(view):
            self.links[member.id] = SimulatedLink(self.node, member, self)

    # ---- what arrives ----

    def hello(self) -> Any:
        return ("worker", self.machine.me, self.shell.number)

    def link_up(self, link: SimulatedLink) -> None:
        self.apply(self.shell.link_up(link.peer.id))

    def link_lost(self, link: SimulatedLink) -> None:
        self.apply(self.shell.link_lost(link.peer.id))

    def receive(self, link: SimulatedLink, message: Any) -> None:
        wire = link.wire
        assert wire is not None
        if wire in self._landing:
            self._landing[wire].append(message)  # one after the other
            return
        match message:
            case ("version", number, shard, version, content, replica, clock):
                whole = not isinstance(content, Mean)
                begins = whole and self.job.stateful_workers and shard not in self.job.buffer_shards
                event = machine.Arriving(shard, version, number, replica, clock, whole, begins)
                effects = self.shell.arriving(event, link.peer.id)
                if machine.Land(shard) in effects:
                    self.slots[shard] = GARBAGE
                    self._landing[wire] = deque()
                    seconds = self.node.world.latency() / 4
                    self.apply(effects)
                    self.node.later(seconds, lambda: self._land(link, wire, shard, content))
                else:
                    self.apply(effects)
            case ("rows", shard, number, content, outdated, _):
                self.rows.arrived(shard, number, content, outdated=outdated)
                self._changed()
            case ("wait", _, replica, clock):
                self.apply(self.machine.handle(machine.ToWait(replica, clock)))
            case ("codec state", shard, replica, state):
                self.encoder.arrived(shard, replica, state)
                self._changed()
            case ("taken", shard, replica):
                self.encoder.taken(shard, replica)
                self._changed()

    def _land(self, link: SimulatedLink, wire: Wire, shard: int, content: Content) -> None:
        waiting = self._landing.pop(wire)
        if link.wire is not wire:
            return  # it broke halfway
        self.slots[shard] = content
        self.apply(self.machine.handle(machine.Landed(shard)))
        for message in waiting:
            if link.wire is wire:
                self.receive(link, message)

    # ---- effects ----

    def apply(self, effects: Sequence[machine.Effect]) -> None:
        """Something has happened: run what follows."""
        self.run(effects)
        self._changed()

    def prepare(self) -> None:
        """Before the main thread chooses what to do: ask for the codec states that it waits for."""
        self.run(self.shell.prepare())

    def run(self, effects: Sequence[machine.Effect]) -> None:
        """The same, and the main thread knows."""
        self.shell.validate()
        for effect in effects:
            match effect:
                case machine.Send():
                    self._send(effect)
                case machine.Fetch(shard=shard, version=version, server=server) if server in self.links:
                    self.fetched += 1
                    self.links[server].send(("fetch", self.shell.number, shard, version))
                case machine.AskNext(shard=shard, replica=replica, server=server) if server in self.links:
                    self._want(self.links[server], ("want", self.shell.number, shard, replica))
                case machine.Follow(server=server, on=on, step=step) if server in self.links:
                    self.links[server].send(("follow", self.shell.number, on, step))
                case machine.Recall() | machine.ReleaseState() | machine.Give() | machine.ResetCodecs():
                    self.encoder.run(effect)

    def filled(self, shard: int, replica: int) -> None:
        """A slot is full: add it up with other replicas of this worker, or send it."""
        if (part := self.machine.presum.part(shard, replica)) is not None:
            self._add_up(shard, replica, part)
        self.run(self.machine.handle(machine.Filled(shard, part)))

    def _add_up(self, shard: int, replica: int, part: Part) -> None:
        start, content = replica, self.slots[shard]
        for at in part.merges:
            kept = self._kept.pop((shard, at))
            content = self.job.add(kept, content) if at < start else self.job.add(content, kept)
            start = min(start, at)
        assert start == part.block.start, f"{part} from replica {replica} on"
        self.slots[shard] = content
        if part.keep:
            self._kept[shard, start] = content

    def _say(self, server: str, message: Any) -> None:
        if server in self.links:
            self.links[server].send(message)

    def _send(self, send: machine.Send) -> None:
        wire = self.links[send.server].wire
        assert wire is not None, f"{send} without a link"
        leaves = max(self._leaves.get(wire, 0.0), self.node.world.now + self.node.world.latency() / 4)
        self._leaves[wire] = leaves
        if send.shard not in self.job.codec_state_shards:
            self.node.later(leaves - self.node.world.now, lambda: self._transmit(wire, send))
            return
        if self.shell.snapshots.copies(send):
            self.encoder.copy(send)
        coded = self.encoder.encode(send, self.slots[send.shard])
        self.node.later(leaves - self.node.world.now, lambda: self._push(wire, send, coded))
        # The slot is free as soon as its gradient is written elsewhere.
        self.run(self.machine.handle(machine.Sent(send.shard, send.serial)))

    def _want(self, link: SimulatedLink, want: Any) -> None:
        """Not before what has been queued: the last want counts."""
        if (wire := link.wire) is not None:
            self.node.later(max(0.0, self._leaves.get(wire, 0.0) - self.node.world.now), lambda: wire.send(0, want))

    def _transmit(self, wire: Wire, send: machine.Send) -> None:
        self._push(wire, send, self.slots[send.shard])  # what is in the slot when the bytes leave
        sent = machine.Sent(send.shard, send.serial)
        self.node.later(self.node.world.latency() / 4, lambda: self.apply(self.machine.handle(sent)))

    def _push(self, wire: Wire, send: machine.Send, content: Content) -> None:
        name = (send.shard, send.step, send.replica, send.count)
        push = ("push", send.view, *name, content, send.base, send.wants)
        for _ in range(2 if self.node.world.random.random() < 0.02 else 1):
            wire.send(0, push)
