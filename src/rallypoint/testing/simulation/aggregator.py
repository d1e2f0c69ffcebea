"""A simulated aggregator: the product's own, with names where tensors would be."""

from __future__ import annotations

from typing import Any, cast

from rallypoint.aggregator import _TICK_S, AggregatorService, AggregatorTick, Upstream
from rallypoint.server import inbox
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.names import NamedIntake, NamedPool, PlayedMember, WireChannel, named_job
from rallypoint.testing.simulation.network import Node, Wire, World, watch


class _FromWorker(WireChannel):
    def refuse(self, reason: str) -> None:
        """The worker uses the servers then. No honest one sends what is no block."""
        if "are no block" in reason or self.wire.malformed is not None:
            super().refuse(reason)
        self.wire.cut()


class SimulatedAggregator(PlayedMember, AggregatorService):
    """One aggregator process."""

    _intake_of = NamedIntake

    def __init__(self, world: World, name: str, job: SimulatedJob) -> None:
        self.job = named_job(job)
        super().__init__(Node(world, name), job)
        cast(Any, self._transport).views = self._views
        self._tick()

    def _begin(self, job: Any) -> Upstream:
        links = super()._begin(self.job)
        assert self._relay is not None
        self.relay, self.machine = self._relay, watch(self._relay._shell.machine, self.id)
        return links

    def _take(self, event: Any) -> None:
        self.relay.handle(event)

    def _tick(self) -> None:
        self._take(AggregatorTick(self.node.world.now))
        self.node.later(_TICK_S, self._tick)

    def accept(self, wire: Wire, hello: Any) -> str:
        _, who, _ = hello
        channel: Any = _FromWorker(wire, 1, who, self._views)
        self.channels.append(channel)
        gone = inbox.Gone(channel, who)
        receive = self._intake.receive_from_worker
        channel.listen(lambda: self._receive(channel, receive, who), lambda: self._take(gone), owes=True)
        self._take(inbox.Linked(channel, who))
        return ""

    def check_memory(self) -> None:
        """Every payload is a part or a version that the machine knows, and no credit is owed."""
        name, relay, machine = self.node.name, self.relay, self.machine
        assert not relay._tickets, f"{name}: {len(relay._tickets)} payloads are forgotten"
        parts = {(known.shard, known.step, part.block.start) for known in machine._sums.values() for part in known}
        assert parts == relay._parts.keys(), f"{name}: parts {parts ^ relay._parts.keys()}"
        kept = {(shard, version) for shard, versions in machine._versions.items() for version in versions}
        assert kept == relay._versions.keys(), f"{name}: versions {kept ^ relay._versions.keys()}"
        unused = cast(NamedPool, self.job.pool).held - len(parts) - len(kept)
        assert 0 <= unused <= self.node.sending, f"{name}: {unused} buffers are held that nobody uses"
        for channel in self.channels:
            assert not channel.owed or channel.wire.malformed, f"{name} owes {channel.name} {channel.owed} credits"
