"""A simulated server: the product's own reducer, with names where tensors would be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from rallypoint.core.protocol import Beat, Capture, Finished, Leaving, NewView
from rallypoint.core.shard.clip import StepVerdict
from rallypoint.core.shard.shell import PeerLinks
from rallypoint.core.view import View, ViewNumber
from rallypoint.errors import ProtocolError
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.server.reducer import Reducer
from rallypoint.server.service import LEAVING_EVERY_S, Peers
from rallypoint.testing.simulation import server_checks
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import SimulatedMembership
from rallypoint.testing.simulation.names import (
    TOKEN,
    NamedIntake,
    NamedPool,
    NamedShard,
    NamedShards,
    PlayedViews,
    SimulatedTransport,
    WireChannel,
    named_job,
)
from rallypoint.testing.simulation.network import Node, Wire, World, watch
from rallypoint.testing.simulation.store import PlayedRestores, PlayedWriter, SimulatedStore

FOLD_S = 0.002  # until a server with an empty inbox applies what it has gathered


def _failed(fault: BaseException) -> None:
    raise fault


class ServedChannel(WireChannel):
    """A connection to a simulated server: it sends what its shards' contents look like to others."""

    def __init__(self, server: SimulatedServer, wire: Wire, name: str) -> None:
        super().__init__(wire, 1, name, server._views)
        self._server = server

    def _content_of(self, header: Header, payload: Any) -> Any:
        content = super()._content_of(header, payload)
        if header.kind in (Kind.VERSION, Kind.STATE) or (header.kind is Kind.ROWS and not header.flags & SKIP):
            server_checks.note_sent(self._server, header, self.name, content)
        if header.kind is Kind.VERSION:
            return self._server.job.sent(header.shard, content)
        if header.kind is Kind.ROWS and not header.flags & SKIP:
            asked = self.asked[header.shard, header.base]
            for_what = (0, -1) if isinstance(asked, memoryview) else asked
            server_checks.check_rows(self._server, header.shard, header.step, content, *for_what)
            if header.shard in self._server.job.table_shards and for_what is not asked and not len(asked):
                return None  # a store asks how far a shard is
        return content


class SimulatedServer:
    """One server process. `decision_s`: a verdict waits in its inbox for up to so long."""

    decision_s = 0.004

    def __init__(self, world: World, name: str, job: SimulatedJob, store: SimulatedStore) -> None:
        self.world, self.node, self.job, self.store = world, Node(world, name), job, store
        self.decided: dict[tuple[ViewNumber, int], tuple[int, float | None]] = {}  # shard and scale by step
        self.used: dict[tuple[ViewNumber, int, int, int], int] = {}  # generation, shard, replica, state -> step
        self.leaving = self._folds = False
        self.taken_from: WireChannel  # from which the frame in progress came
        self._views = PlayedViews()
        self._job = whole = named_job(job)
        self._intake = NamedIntake(whole, self._views, self._heard, name)
        self.reducer = Reducer(name, whole, self, self._put, Tracer(name), PlayedWriter(self))
        self.reducer._parts.factory = NamedShards(self)
        cast(NamedPool, whole.pool).held = 0  # the factory in whose place that is has kept one
        self.reducer._restores = self.reducer._parts.restores = PlayedRestores(self)
        self.machine, self.shell = watch(self.reducer.machine, name), self.reducer.shell
        self.held = cast("dict[int, NamedShard]", self.reducer._owned)
        server_checks.check_while_it_runs(self)
        self._transport = SimulatedTransport(self.node, "server")
        self._peers = Peers(
            PeerLinks(name, decides=bool(whole.plan.decides)), self._views, cast(Any, self.reducer_event),
            transport=cast(Any, self._transport), credentials=cast(Any, None), tracer=Tracer(name), failed=_failed,
        )  # fmt: skip
        world.acceptors[name] = self
        self.membership = SimulatedMembership(
            self.node, "server", self._on_message, self._on_admitted, name,
            lambda: Beat(self._peers.unreachable()),
        )  # fmt: skip

    # ---- the inbox and its owner ----

    def reducer_event(self, event: inbox.Event) -> None:
        """The owner takes this event; then it is idle."""
        self.reducer.handle(event)
        self._rest()

    def restored(self, event: inbox.Event) -> None:
        """A shard was read: its codec states are of this generation now."""
        if isinstance(event, inbox.Restored):
            of, kept = self.world.tokens, dict[int, Any]()
            for replica, state in event.record.codec_states.items():  # behind the name is what was sent last
                residual = of.of(state[:TOKEN])._replace(generation=event.generation)
                kept[replica] = np.frombuffer(bytes(of.bytes_of(residual)) + bytes(state[TOKEN:]), np.uint8)
            event = replace(event, record=replace(event.record, codec_states=kept))
        self.reducer_event(event)

    def _put(self, event: inbox.Event) -> None:
        """The reducer's own events: a verdict waits behind what came before it, a view perhaps."""
        if not isinstance(event, inbox.VerdictCame):
            return  # it is always awake
        verdict = event.verdict

        def decide() -> None:
            if verdict.generation != (now := self.shell.fence.generation):
                effects = self.shell.decided(verdict)
                assert not effects, f"{self.node.name}: {verdict} is taken in generation {now}"
            self.reducer_event(event)

        self.node.later(self.world.random.uniform(0.0, self.decision_s), decide)

    def _rest(self) -> None:
        while not self.reducer._parts.gathering and (work := self.reducer.idle_work()):
            work()
        if self.reducer._parts.gathering and not self._folds:
            self._folds = True
            self.node.later(FOLD_S, self._fold)

    def _fold(self) -> None:
        self._folds = False
        if self.reducer._parts.gathering and (work := self.reducer.idle_work()):
            work()
        self._rest()

    # ---- what the reducer says ----

    def say(self, message: Any) -> None:
        """To the coordinator."""
        self.membership.send(message)

    def not_finite(self, verdict: StepVerdict, *, alone: bool) -> None:
        """A step is skipped, or stops the job."""
        server_checks.report(self, verdict)

    # ---- the coordinator's words ----

    def _on_admitted(self, new: bool) -> None:
        self.reducer_event(inbox.AdmissionCame(new))

    def leave(self) -> None:
        """SIGTERM: it hands its shards over. It says so again: a coordinator that takes over has not heard it."""
        self.leaving = True
        self.membership.send(Leaving())
        self.node.later(LEAVING_EVERY_S, self.leave)

    def crashes(self) -> None:
        """It is about to be killed."""
        if self.reducer._codec_states is not None:
            self.job.lost.extend(sorted(self.reducer._codec_states._relay.between))

    def _on_message(self, message: Any) -> None:
        match message:
            case Finished():
                self.membership.close()
                self.node.kill()
            case NewView(view=view) if not self.shell.fence.has_come(view.number):
                self._viewed(view)
            case Capture(snapshot=id, version=version):
                self.reducer_event(inbox.CaptureWanted(id, version))

    def _viewed(self, view: View) -> None:
        with server_checks.states_that_are_lost(self, view):
            self.reducer_event(inbox.ViewCame(view))
        self._views.adopt(view)
        self._peers.adopt(view)
        for channel in list(self._transport.channels):
            channel.drain()

    # ---- connections ----

    def accept(self, wire: Wire, hello: Any) -> str:
        role, who, _ = hello
        channel: Any = ServedChannel(self, wire, who)
        self._transport.channels.append(channel)
        receive = {
            "server": self._intake.receive_from_server, "aggregator": self._intake.receive_from_aggregator,
            "worker": self._intake.receive_from_worker,
        }[role]  # fmt: skip

        def came() -> None:
            self.taken_from = channel
            try:
                receive(channel, who)
            except ProtocolError as error:
                raise AssertionError(f"{self.node.name} refuses {who}: {error}") from error

        channel.listen(came, lambda: self.reducer_event(inbox.Gone(channel, who)), owes=role != "server")
        if role != "server":
            self.reducer_event(inbox.Linked(channel, who))
        return ""

    def _heard(self, event: inbox.Event) -> None:
        if not isinstance(event, inbox.Followed | inbox.UnfollowCame | inbox.Fetched):  # the shell looks at questions
            server_checks.note_taken(self, type(event).__name__, what="hears")
        self.reducer_event(event)

    # ---- afterwards ----

    def check_tickets(self) -> None:
        """No payload is forgotten, and no credit: each one that is still here waits for its turn."""
        tickets = self.reducer._tickets
        waiting = sum(len(m._held) for i in self.machine.held if (m := self.machine.machine(i)) is not None)
        arrived = tickets._arrived
        assert waiting == len(arrived), f"{self.node.name}: {len(arrived)} payloads, {waiting} of use"
        parts = sum(len(shard.parts) for shard in self.held.values())
        buffers = cast(NamedPool, self._job.pool).held
        unused = buffers - parts - len(arrived)
        assert 0 <= unused <= self.node.sending, f"{self.node.name}: {unused} buffers are held that nobody uses"
        for channel in self._transport.channels:
            if channel.wire.open:
                kept = sum(cast(Any, a.channel) is channel and not a.credited for a in arrived.values())
                kept += sum(cast(Any, early.owed) is channel for early in tickets._early.values())
                assert channel.owed == kept, f"{self.node.name} owes {channel.name} {channel.owed} credits, not {kept}"
