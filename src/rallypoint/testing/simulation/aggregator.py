"""A simulated aggregator: the real machine and the real shell; names where tensors would be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rallypoint.core import aggregator as machine
from rallypoint.core.aggregator import AggregatorMachine, AggregatorShell
from rallypoint.core.protocol import Beat, Finished
from rallypoint.core.shard.shell import PeerLinks
from rallypoint.core.sums import Block
from rallypoint.core.view import View, ViewNumber
from rallypoint.server.job import plan_of
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import SimulatedMembership
from rallypoint.testing.simulation.network import Node, SimulatedLink, Wire, World, watch
from rallypoint.testing.simulation.replicas.contents import Content, Mean

TICK_S = 0.25


class SimulatedAggregator:
    """One aggregator process."""

    def __init__(self, world: World, name: str, job: SimulatedJob) -> None:
        self.node, self.job = Node(world, name), job
        plan = plan_of(job.config, job.layout.shards)
        self.machine = watch(AggregatorMachine(name, plan.expected, plan.cadence, plan.carried), name)
        self.shell: AggregatorShell[Wire] = AggregatorShell(self.machine)
        self._wanted = PeerLinks(name, decides=True)
        self._links: dict[str, SimulatedLink] = {}
        self._waiting: deque[tuple[ViewNumber, Callable[[], None]]] = deque()
        self._tickets: dict[int, tuple[Content, Wire | None]] = {}  # a payload, and the worker's link on which it came
        self._last_ticket = 0
        self._parts: dict[tuple[int, int, int], Content] = {}
        self._versions: dict[tuple[int, int], Content] = {}
        self.merged = self.pushed = 0
        world.acceptors[name] = self
        self.membership = SimulatedMembership(
            self.node, "aggregator", self._on_message, lambda new: None, name, lambda: Beat(self._unreachable())
        )
        self._tick()

    def _unreachable(self) -> dict[str, float]:
        missed = {server: link.unreachable() for server, link in self._links.items()}
        return {server: seconds for server, seconds in missed.items() if seconds > 0}

    def _tick(self) -> None:
        self._run(self.machine.tick(self.node.world.now))
        self.node.later(TICK_S, self._tick)

    # ---- the coordinator's words ----

    def _on_message(self, message: Any) -> None:
        match message:
            case Finished():
                self.membership.close()
                self.node.kill()
            case ("view", View() as view) if not self.shell.fence.has_come(view.number):
                self._viewed(view)

    def _viewed(self, view: View) -> None:
        self._run(self.shell.adopt(view))
        gone, new = self._wanted.adopt(view)
        for server, _ in gone:
            self._links.pop(server).close()
        for member in new:
            self._links[member.id] = SimulatedLink(self.node, member, self)
        waiting, self._waiting = self._waiting, deque()
        for number, call in waiting:
            self._when_known(number, call)

    def _when_known(self, number: ViewNumber, call: Callable[[], None]) -> None:
        """A frame of a view that has not come here yet waits for it."""
        if self.shell.fence.has_come(number):
            call()
        else:
            self._waiting.append((number, call))

    # ---- servers ----

    def hello(self) -> Any:
        return ("aggregator", self.node.name, self.shell.fence.number)

    def link_up(self, link: SimulatedLink) -> None:
        self._run(self.shell.server_up(link.peer))

    def link_lost(self, link: SimulatedLink) -> None:
        self._run(self.shell.server_lost(link.peer))

    def receive(self, link: SimulatedLink, message: Any) -> None:
        match message:
            case ("version", number, shard, version, content, 0, 0):
                self._when_known(number, lambda: self._arrived(number, shard, version, content))

    def _arrived(self, number: ViewNumber, shard: int, version: int, content: Content) -> None:
        begins = self.job.stateful_workers and not isinstance(content, Mean) and shard not in self.job.buffer_shards
        if not begins:  # who needs a whole state asks the servers for it
            self._run(self.shell.arrived(shard, version, self._ticket(content), number))

    # ---- workers ----

    def accept(self, wire: Wire, hello: Any) -> str:
        _, who, _ = hello
        wire.on_message[1] = lambda message: self._when_known(message[1], lambda: self._take(wire, who, message))
        wire.on_close[1] = lambda: self._run(self.shell.gone(wire, who))
        self._run(self.shell.linked(wire, who))
        return ""

    def _take(self, wire: Wire, who: str, message: Any) -> None:
        match message:
            case ("push", number, shard, step, replica, count, content, *_):
                flags = {r: self.job.flags(shard, step, r) for r in range(replica, replica + count)}
                losses = tuple(r for r, (finite, whole) in flags.items() if whole and not finite)
                gradients = tuple(r for r, (_, whole) in flags.items() if not whole)
                new = machine.BlockContribution(
                    shard, step, Block(replica, replica + count), float(count), self._ticket(content, wire), losses,
                    gradients,
                )  # fmt: skip
                self._run(self.shell.contributed(who, new, number))
            case ("follow", number, True, round):
                self._run(self.shell.followed(wire, who, round, number))
            case ("follow", _, False, _):
                self._run(self.shell.unfollowed(wire, who))
            case ("fetch", _, shard, version):
                self._run(self.shell.fetched(wire, who, shard, version))
            case _:
                raise AssertionError(f"{who} says {message} to {self.node.name}")

    # ---- effects ----

    def _ticket(self, content: Content, wire: Wire | None = None) -> int:
        self._last_ticket += 1
        self._tickets[self._last_ticket] = content, wire
        return self._last_ticket

    def _run(self, effects: Iterable[machine.Effect]) -> None:
        for effect in effects:
            match effect:
                case machine.Keep(shard=shard, step=step, at=at, ticket=ticket):
                    self._parts[shard, step, at], _ = self._tickets.pop(ticket)
                case machine.DropPayload(ticket=ticket, fault=fault):
                    _, wire = self._tickets.pop(ticket)
                    if fault and wire is not None:
                        assert "step" in fault, f"{self.node.name}: {fault}"  # else it is behind: cut off from a server
                        wire.cut()
                case machine.MergeParts(shard=shard, step=step, left=left, right=right):
                    self.merged += 1
                    other = self._parts.pop((shard, step, right))
                    self._parts[shard, step, left] = self.job.add(self._parts[shard, step, left], other)
                case machine.Forget(shard=shard, step=step, at=at):
                    del self._parts[shard, step, at]
                case machine.PushPart(shard=shard, step=step, block=block, server=server):
                    self.pushed += 1
                    name = (shard, step, block.start, block.size)
                    content = self._parts[shard, step, block.start]
                    self._links[server].send(("push", self.shell.fence.number, *name, content, 0, None))
                case machine.KeepVersion(shard=shard, version=version, ticket=ticket):
                    self._versions[shard, version], _ = self._tickets.pop(ticket)
                case machine.GiveVersion(worker=worker, shard=shard, version=version):
                    if (wire := self.shell.workers.get(worker)) is not None:
                        content = self._versions[shard, version]
                        wire.send(1, ("version", self.shell.fence.number, shard, version, content, 0, 0))
                case machine.ReleaseVersion(shard=shard, version=version):
                    del self._versions[shard, version]
                case machine.FollowServer(server=server):
                    self._links[server].send(("follow", self.shell.fence.number, True, 0))
                case machine.FetchVersion(shard=shard, version=version, server=server):
                    self._links[server].send(("fetch", self.shell.fence.number, shard, version))
                case machine.DismissWorkers():
                    for wire in self.shell.dismissed(effect):
                        wire.cut()

    def check_memory(self) -> None:
        """Every payload is a part or a version that the machine knows."""
        assert not self._tickets, f"{self.node.name}: {len(self._tickets)} payloads are forgotten"
        parts = {(known.shard, known.step, part.block.start) for known in self.machine._sums.values() for part in known}
        assert parts == self._parts.keys(), f"{self.node.name}: parts {parts ^ self._parts.keys()}"
        kept = {(shard, version) for shard, versions in self.machine._versions.items() for version in versions}
        assert kept == self._versions.keys(), f"{self.node.name}: versions {kept ^ self._versions.keys()}"
