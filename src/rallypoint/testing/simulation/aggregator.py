"""A simulated aggregator: the product's own relay and intake, with names where tensors would be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rallypoint.aggregator import AggregatorRelay, AggregatorTick, Event, Upstream
from rallypoint.core.aggregator import AggregatorMachine, AggregatorShell
from rallypoint.core.protocol import Beat, Finished, NewView
from rallypoint.core.view import Member, View
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import SimulatedMembership
from rallypoint.testing.simulation.names import (
    NamedIntake,
    NamedPool,
    PlayedViews,
    SimulatedTransport,
    WireChannel,
    named_job,
)
from rallypoint.testing.simulation.network import Node, Wire, World, watch
from rallypoint.testing.simulation.server import _failed

TICK_S = 0.25


class _FromWorker(WireChannel):
    def refuse(self, reason: str) -> None:
        """The worker uses the servers then. No honest one sends what is no block."""
        assert "are no block" not in reason, f"{self.name} is refused: {reason}"
        self.wire.cut()


class SimulatedAggregator:
    """One aggregator process."""

    def __init__(self, world: World, name: str, job: SimulatedJob) -> None:
        self.node, self.job, self.views = Node(world, name), named_job(job), PlayedViews()
        plan = self.job.plan
        self.machine = watch(AggregatorMachine(name, plan.expected, plan.cadence, plan.carried), name)
        self.shell: AggregatorShell[Any] = AggregatorShell(self.machine)
        self._transport = SimulatedTransport(self.node, "aggregator", self.views)
        me: Any = SimpleNamespace(me=Member(name, "host"))
        self._upstream = Upstream(
            me, self.job, self.views, lambda event: self.handle(cast(Event, event)),
            transport=cast(Any, self._transport), tracer=Tracer(name), failed=_failed,
        )  # fmt: skip
        self._relay = AggregatorRelay(self.job, self.shell, self._upstream, Tracer(name))
        self.handle = self._relay.handle
        self._intake = NamedIntake(self.job, self.views, self.handle, name)
        world.acceptors[name] = self
        self.membership = SimulatedMembership(
            self.node, "aggregator", self._on_message, lambda new: None, name,
            lambda: Beat(self._upstream.unreachable()),
        )  # fmt: skip
        self._tick()

    def _tick(self) -> None:
        self.handle(AggregatorTick(self.node.world.now))
        self.node.later(TICK_S, self._tick)

    def _on_message(self, message: Any) -> None:
        match message:
            case Finished():
                self.membership.close()
                self.node.kill()
            case NewView(view=view) if not self.views.knows(view.number):
                self._viewed(view)

    def _viewed(self, view: View) -> None:
        self.views.adopt(view)
        self.handle(inbox.ViewCame(view))
        self._upstream.adopt(view)
        for channel in list(self._transport.channels):
            channel.drain()

    def accept(self, wire: Wire, hello: Any) -> str:
        _, who, _ = hello
        channel: Any = _FromWorker(wire, 1, who, self.views)
        self._transport.channels.append(channel)
        gone = inbox.Gone(channel, who)
        channel.listen(lambda: self._intake.receive_from_worker(channel, who), lambda: self.handle(gone), owes=True)
        self.handle(inbox.Linked(channel, who))
        return ""

    def check_memory(self) -> None:
        """Every payload is a part or a version that the machine knows, and no credit is owed."""
        name, relay, machine = self.node.name, self._relay, self.machine
        assert not relay._tickets, f"{name}: {len(relay._tickets)} payloads are forgotten"
        parts = {(known.shard, known.step, part.block.start) for known in machine._sums.values() for part in known}
        assert parts == relay._parts.keys(), f"{name}: parts {parts ^ relay._parts.keys()}"
        kept = {(shard, version) for shard, versions in machine._versions.items() for version in versions}
        assert kept == relay._versions.keys(), f"{name}: versions {kept ^ relay._versions.keys()}"
        unused = cast(NamedPool, self.job.pool).held - len(parts) - len(kept)
        assert 0 <= unused <= self.node.sending, f"{name}: {unused} buffers are held that nobody uses"
        for channel in self._transport.channels:
            assert not channel.owed, f"{name} owes {channel.name} {channel.owed} credits"
