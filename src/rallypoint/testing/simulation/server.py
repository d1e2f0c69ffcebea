"""A simulated server: the product's own reducer, with names where tensors would be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np

from rallypoint.config import audits_of
from rallypoint.core.protocol import Beat, Finished, Leaving
from rallypoint.core.shard.clip import Measure, StepVerdict
from rallypoint.core.shard.events import Acked
from rallypoint.core.shard.shell import Key, PeerLinks
from rallypoint.core.view import View, ViewNumber
from rallypoint.net.frames import BAD_GRADIENT, COPY, NEWEST, NOT_FINITE, Header, Kind, wants
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.server.job import ServerJob
from rallypoint.server.reducer import Reducer
from rallypoint.server.service import LEAVING_EVERY_S
from rallypoint.store.record import decode_record
from rallypoint.testing.simulation import server_checks
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import SimulatedMembership
from rallypoint.testing.simulation.names import (
    NBYTES,
    NamedBuffer,
    NamedRestores,
    NamedShard,
    NamedShards,
    NamedWriter,
    WireChannel,
)
from rallypoint.testing.simulation.network import Node, SimulatedLink, Wire, World, watch
from rallypoint.testing.simulation.store import SimulatedStore

FOLD_S = 0.002  # until a server with an empty inbox applies what it has gathered
_measures = msgspec.msgpack.Decoder(tuple[Measure, ...])
_choices = msgspec.msgpack.Decoder(tuple[int, ...])


class SimulatedServer:
    """One server process. `decision_s`: a verdict waits in its inbox for up to so long."""

    decision_s = 0.004

    def __init__(self, world: World, name: str, job: SimulatedJob, store: SimulatedStore) -> None:
        self.world, self.node, self.job, self.store = world, Node(world, name), job, store
        self.decided: dict[tuple[ViewNumber, int], tuple[int, float | None]] = {}  # shard and scale by step
        self.used: dict[tuple[ViewNumber, int, int, int], int] = {}  # generation, shard, replica, state -> step
        self.leaving = self._folds = False
        self._buffers = 0  # that somebody holds
        self._channels: list[Any] = []
        self._waiting: deque[tuple[ViewNumber, Callable[[], None]]] = deque()
        whole = ServerJob(job.record, job.config)
        self.reducer = Reducer(name, whole, self, self._put, Tracer(name), cast(Any, NamedWriter(self)))
        self.reducer._parts.factory = NamedShards(self)
        self.reducer._restores = self.reducer._parts.restores = NamedRestores(self)
        self.machine, self.shell = watch(self.reducer.machine, name), self.reducer.shell
        self.held = cast("dict[int, NamedShard]", self.reducer._owned)
        server_checks.check_while_it_runs(self)
        self._wanted = PeerLinks(name, decides=bool(whole.plan.decides))
        self._links: dict[Key, SimulatedLink] = {}
        self._peers: dict[SimulatedLink, Any] = {}  # the channels of those that stand
        world.acceptors[name] = self
        self.membership = SimulatedMembership(
            self.node, "server", self._on_message, self._on_admitted, name,
            lambda: Beat({link.peer.id: link.unreachable() for link in self._links.values() if link.wire is None}),
        )  # fmt: skip

    # ---- the inbox and its owner ----

    def reducer_event(self, event: inbox.Event) -> None:
        """The owner takes this event; then it is idle."""
        self.reducer.handle(event)
        self._rest()

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
            case ("view", View() as view) if not self.shell.fence.has_come(view.number):
                self._viewed(view)
            case ("capture", id, version, _):
                self.reducer_event(inbox.CaptureWanted(id, version))

    def _viewed(self, view: View) -> None:
        with server_checks.states_that_are_lost(self, view):
            self.reducer_event(inbox.ViewCame(view))
        gone, new = self._wanted.adopt(view)
        for key in gone:
            self._links.pop(key).close()
        for member in new:
            self._links[member.id, member.incarnation] = SimulatedLink(self.node, member, self)
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

    def _channel(self, wire: Wire, end: int, who: str) -> WireChannel:
        self._channels = [known for known in self._channels if known.wire.open]
        self._channels.append(channel := WireChannel(self, wire, end, who))
        return channel

    def hello(self) -> Any:
        return ("server", self.node.name, self.shell.fence.number)

    def link_up(self, link: SimulatedLink) -> None:
        assert link.wire is not None
        self._peers[link] = self._channel(link.wire, 0, link.peer.id)
        self.reducer_event(inbox.PeerLinked(link.peer, self._peers[link]))

    def link_lost(self, link: SimulatedLink) -> None:
        self.reducer_event(inbox.PeerLost(link.peer.id, self._peers.pop(link)))

    def receive(self, link: SimulatedLink, message: Any) -> None:
        _, number, header, digest = message
        acked, channel = Acked(header.step, chosen=header.base == 1), self._peers[link]
        self.reducer_event(inbox.AckCame(link.peer.id, channel, header.shard, acked, number, bytes(digest)))

    def accept(self, wire: Wire, hello: Any) -> str:
        role, who, _ = hello
        channel: Any = self._channel(wire, 1, who)
        take = self._take_from_server if role == "server" else self._take

        def came(message: Any) -> None:
            server_checks.check_current(self, who, message)
            self.reducer_event(take(channel, who, message))

        wire.on_message[1] = lambda message: self._when_known(message[1], lambda: came(message))
        wire.on_close[1] = lambda: self.reducer_event(inbox.Gone(channel, who))
        if role != "server":
            self.reducer_event(inbox.Linked(channel, who))
        return ""

    def _buffer(self, content: Any) -> Any:
        self._buffers += 1
        return NamedBuffer(content, freed=self._freed)

    def _freed(self) -> None:
        self._buffers -= 1

    def _take_from_server(self, channel: Any, who: str, message: Any) -> inbox.Event:
        """As `Intake.receive_from_server` does it."""
        _, number, header, payload = message
        match header.kind:
            case Kind.REPLICATE:
                return inbox.UpdateCame(channel, who, header, self._buffer(payload))
            case Kind.MEASURES:
                return inbox.Told(header.step, _measures.decode(payload), number)
            case Kind.CHOICE:
                return inbox.ChoiceCame(channel, who, header, _choices.decode(payload))
            case Kind.PROVE:
                return inbox.QuestionCame(channel, who, header, bytes(payload))
            case _:
                return inbox.StateCame(channel, who, decode_record(bytes(payload)), number)

    def _take(self, channel: Any, who: str, message: Any) -> inbox.Event:
        """As `Intake.receive_from_worker` does it."""
        kind, number, *_ = message
        match message:
            case ("push", *_):
                return self._pushed(channel, who, message)
            case ("want", _, shard, replica):
                return inbox.WantCame(channel, who, shard, replica)
            case ("pull", _, shard, version, newest, pull, step, replica):
                channel.asked[shard, pull] = (step, replica)
                flags = NEWEST if newest else 0
                header = Header(Kind.PULL_ROWS, number, shard=shard, step=version, base=pull, flags=flags)
                return inbox.PullCame(channel, header, cast(Any, np.zeros(0, np.int64)))
            case ("initial", _, shard, content, version):
                channel.owed += 1
                header = Header(Kind.INITIAL, number, shard=shard, step=version, length=NBYTES)
                return inbox.Initial(channel, header, self._buffer(content))
            case ("follow", _, on, _):
                header = Header(Kind.FOLLOW, number)
                return inbox.Followed(channel, who, header) if on else inbox.UnfollowCame(channel, who)
            case ("fetch", _, shard, version):
                return inbox.Fetched(channel, who, shard, version)
            case ("recall", _, shard, replica):
                return inbox.StateRecalled(channel, who, Header(Kind.RECALL, number, shard=shard, replica=replica))
            case ("give" | "copy", _, shard, replica, state):
                header = Header(
                    Kind.CODEC_STATE, number, shard=shard, replica=replica, step=0 if state is None else state.step,
                    base=COPY if kind == "copy" else 0,
                )  # fmt: skip
                data = memoryview(b"") if state is None else self.world.tokens.bytes_of(state)
                return inbox.StateGiven(who, header, data)
        raise AssertionError(f"{who} says {message} to {self.node.name}")

    def _pushed(self, channel: Any, who: str, message: Any) -> inbox.Event:
        _, number, shard, step, replica, count, content, base, asks = message
        channel.owed += 1
        said = {r: self.job.flags(shard, step, r) for r in range(replica, replica + count)}
        finite, whole = all(flag[0] for flag in said.values()), all(flag[1] for flag in said.values())
        tree = self.job.policy.tree
        bad = sum(1 << r - replica for r, (good, _) in said.items() if not good and r - replica < 32)
        header = Header(
            Kind.PUSH, number, shard=shard, replica=replica, step=step, weight=float(count), length=NBYTES,
            flags=0 if finite else NOT_FINITE if whole else BAD_GRADIENT, base=count - 1 if tree else base,
            wants=(bad if count > 1 else 0) if tree else wants(asks),
        )  # fmt: skip
        audits = audits_of(self.job.config)
        digest = str(content).encode() if audits is not None and audits.audited(step) else b""
        return inbox.Pushed(channel, who, header, self._buffer(content), digest)

    # ---- afterwards ----

    def check_tickets(self) -> None:
        """No payload is forgotten, and no credit: each one that is still here waits for its turn."""
        tickets = self.reducer._tickets
        waiting = sum(len(m._held) for i in self.machine.held if (m := self.machine.machine(i)) is not None)
        arrived = tickets._arrived
        assert waiting == len(arrived), f"{self.node.name}: {len(arrived)} payloads, {waiting} of use"
        parts = sum(len(shard.parts) for shard in self.held.values())
        assert self._buffers == parts + len(arrived), f"{self.node.name}: {self._buffers} buffers are held"
        for channel in self._channels:
            if channel.wire.open:
                kept = sum(a.channel is channel and not a.credited for a in arrived.values())
                kept += sum(early.owed is channel for early in tickets._early.values())
                assert channel.owed == kept, f"{self.node.name} owes {channel.name} {channel.owed} credits, not {kept}"
