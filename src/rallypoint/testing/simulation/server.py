"""A simulated server: the product's own reducer and shards, with a name for each tensor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from rallypoint.aggregator import _TICK_S, AggregatorService, AggregatorTick, Upstream
from rallypoint.core.protocol import Disproved, Leaving, Message, NewView
from rallypoint.core.shard.clip import StepVerdict
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.view import ViewNumber
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.server import inbox
from rallypoint.server.service import LEAVING_EVERY_S, Peers, ServerService
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.names import TOKEN, NamedIntake, NamedPool, PlayedMember, WireChannel, named_job
from rallypoint.testing.simulation.network import Node, Wire, World, watch
from rallypoint.testing.simulation.operating import server_checks
from rallypoint.testing.simulation.shards import NamedShard, NamedShards
from rallypoint.testing.simulation.store import PlayedRestores, PlayedWriter, SimulatedStore

FOLD_S = 0.002  # until a server with an empty inbox applies what it has gathered
UPDATE_S = 0.02  # that a thread takes at most to make an update


class ServedChannel(WireChannel):
    """A connection to a simulated server: it sends what its shards' contents look like to others."""

    def __init__(self, server: SimulatedServer, wire: Wire, name: str) -> None:
        super().__init__(wire, 1, name, server._views)
        self._server = server

    def _content_of(self, header: Header, payload: Any) -> Any:
        content = super()._content_of(header, payload)
        pulled = header.kind in (Kind.ROWS, Kind.WORDS) and not header.flags & SKIP
        if header.kind in (Kind.VERSION, Kind.STATE) or pulled:
            server_checks.note_sent(self._server, header, self.name, content)
        if header.kind is Kind.VERSION:
            return self._server.job.sent(header.shard, content)
        if pulled:
            asked = self.asked.get((header.shard, header.base), b"")  # of words nothing is kept
            server_checks.check_rows(self._server, header.shard, header.step, content, *getattr(asked, "of", (0, -1)))
            if header.shard in self._server.job.table_shards and not len(asked):
                return None  # a store asks how far a shard is
        return content


class Made(Future[Any]):
    """What a thread makes: now, when somebody waits for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make

    def make(self) -> None:
        """Make it, unless that was done."""
        if not self.done():
            self.set_result(self._make())

    def result(self, timeout: float | None = None) -> Any:
        self.make()
        return super().result(timeout)


class PlayedThreads(Executor):
    """The threads of a server that make updates. The seed decides how long each takes."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server

    def submit(self, make: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        made = Made(partial(make, *args))
        self._server.node.later(self._server.world.random.uniform(0.0, UPDATE_S), made.make)
        return made


_SAID = (
    inbox.Pushed, inbox.Initial, inbox.WantCame, inbox.PullCame, inbox.StateGiven, inbox.StateRecalled,
    inbox.UpdateCame, inbox.StateCame, inbox.ChoiceCame, inbox.QuestionCame, inbox.Told,
)  # fmt: skip


class SimulatedServer(PlayedMember, ServerService):
    """One server process. `decision_s`: a verdict waits in its inbox for up to so long."""

    decision_s = 0.004
    _intake_of = NamedIntake

    def __init__(self, world: World, name: str, job: SimulatedJob, store: SimulatedStore) -> None:
        self.world, self.job, self.store = world, job, store
        self.decided: dict[tuple[ViewNumber, int], tuple[int, float | None]] = {}  # shard and scale by step
        self.used: dict[tuple[ViewNumber, int, int, int], int] = {}  # generation, shard, replica, state -> step
        self.leaving = self._folds = self._adds = False
        self.taken_from: WireChannel  # from which the frame in progress came
        self._writer_of = cast(Any, lambda *about: PlayedWriter(self))
        super().__init__(Node(world, name), job, store.url)

    def _begin(self, job: Any) -> Peers:
        self._job = whole = named_job(self.job)
        links = super()._begin(whole)
        assert self._reducer is not None
        self.reducer, self.shell = self._reducer, self._reducer.shell
        self.reducer._parts.factory = NamedShards(self)
        cast(NamedPool, whole.pool).held = 0  # the factory in whose place that is has kept one
        self.reducer._restores = self.reducer._parts.restores = PlayedRestores(self)
        watch(self.machine, self.id)
        self.held = cast("dict[int, NamedShard]", self.reducer._owned)
        server_checks.check_while_it_runs(self)
        return links

    @property
    def machine(self) -> ServerMachine:
        return self.reducer.machine

    # ---- the inbox and its owner ----

    def reducer_event(self, event: inbox.Event) -> None:
        """The owner takes this event; then it is idle."""
        self.reducer.handle(event)
        self._rest()

    def update_beside(self) -> None:
        """From now on threads make the updates of parameters."""
        effects, job = self.reducer._effects, self._job
        effects.threads, effects._beside = PlayedThreads(self), dict.fromkeys(job.plan.measured, 1 << 30)
        effects.least = self.world.random.choice([0, 64, 192])

    def _take(self, event: Any) -> None:
        match event:
            case StepVerdict():
                self._put_verdict(event)
            case inbox.UpdateMade():
                self.node.later(0.0, lambda: self.reducer_event(event))
            case inbox.Wake():
                pass  # it is always awake
            case _:
                if isinstance(event, _SAID):  # (the shell looks at questions)
                    server_checks.note_taken(self, type(event).__name__, what="hears")
                self.reducer_event(event)

    def restored(self, event: inbox.Event) -> None:
        """A shard was read: its codec states are of this generation now."""
        if isinstance(event, inbox.Restored):
            of, kept = self.world.tokens, dict[int, Any]()
            for replica, state in event.record.codec_states.items():  # behind the name is what was sent last
                renewed = [
                    bytes(of.bytes_of(of.of(name)._replace(generation=event.generation)))
                    for name in (state[:TOKEN], state[-TOKEN:])
                ]  # fmt: skip
                kept[replica] = np.frombuffer(bytes(state[TOKEN:-TOKEN]).join(renewed), np.uint8)
            event = inbox.Restored(replace(event.record, codec_states=kept), event.generation)
        self.reducer_event(event)

    def _put_verdict(self, verdict: StepVerdict) -> None:
        """It waits behind what came before it, a view perhaps."""

        def decide() -> None:
            if verdict.generation != (now := self.shell.fence.generation):
                effects = self.machine.decided(verdict)
                assert not effects, f"{self.node.name}: {verdict} is taken in generation {now}"
            self.reducer_event(verdict)

        self.node.later(self.world.random.uniform(0.0, self.decision_s), decide)

    def _rest(self) -> None:
        if self.reducer._effects.adding and not self._adds:
            self._adds = True
            self.node.later(self.world.random.uniform(0.0, UPDATE_S), self._add_up)
        while not self._adds and not self.reducer._parts.gathering and (work := self.reducer.idle_work()):
            work()
        if self.reducer._parts.gathering and not self._folds:
            self._folds = True
            self.node.later(FOLD_S, self._fold)

    def _add_up(self) -> None:
        self._adds = False
        if self.reducer._effects.adding:
            self.reducer._effects.add_up()
        self._rest()

    def _fold(self) -> None:
        self._folds = False
        if self.reducer._parts.gathering and (work := self.reducer.idle_work()):
            work()
        self._rest()

    def say(self, message: Message) -> None:
        assert not isinstance(message, Disproved), f"{self.node.name}: a backup has other bytes: {message}"
        super().say(message)

    def not_finite(self, verdict: StepVerdict, *, alone: bool) -> None:
        if verdict.stops or self.job.recorded:
            super().not_finite(verdict, alone=alone)

    # ---- the coordinator's words ----

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
        if not (isinstance(message, NewView) and self._views.is_new(message.view)):
            super()._on_message(message)
            return
        with server_checks.states_that_are_lost(self, message.view):
            super()._on_message(message)

    def accept(self, wire: Wire, hello: Any) -> str:
        role, who, _ = hello
        channel: Any = ServedChannel(self, wire, who)
        self.channels.append(channel)
        receive = {
            "server": self._intake.receive_from_server, "aggregator": self._intake.receive_from_aggregator,
            "worker": self._intake.receive_from_worker,
        }[role]  # fmt: skip

        def came() -> None:
            self.taken_from = channel
            self._receive(channel, receive, who)

        channel.listen(came, lambda: self.reducer_event(inbox.Gone(channel, who)), owes=role != "server")
        if role != "server":
            self.reducer_event(inbox.Linked(channel, who))
        return ""

    def check_tickets(self) -> None:
        """No payload is forgotten, and no credit: each one that is still here waits for its turn."""
        self.reducer._effects.settle()
        tickets = self.reducer._tickets
        waiting = sum(len(m._held) for i in self.machine.held if (m := self.machine.machine(i)) is not None)
        arrived = tickets._arrived
        assert waiting == len(arrived), f"{self.node.name}: {len(arrived)} payloads, {waiting} of use"
        parts = sum(len(shard.parts) for shard in self.held.values())
        buffers = cast(NamedPool, self._job.pool).held
        unused = buffers - parts - len(arrived)
        assert 0 <= unused <= self.node.sending, f"{self.node.name}: {unused} buffers are held that nobody uses"
        factory = cast(NamedShards, self.reducer._parts.factory)
        left = factory.held - sum(shard.buffers for shard in self.held.values())
        assert 0 <= left <= self.node.sending, f"{self.node.name}: {left} buffers with floats are held that nobody uses"
        for channel in self.channels:
            if channel.wire.open:
                kept = sum(cast(Any, a.channel) is channel and not a.credited for a in arrived.values())
                kept += sum(cast(Any, early.owed) is channel for early in tickets._early.values())
                assert channel.owed == kept, f"{self.node.name} owes {channel.name} {channel.owed} credits, not {kept}"


# ---- A simulated aggregator: the product's own, with names where tensors would be ----


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
