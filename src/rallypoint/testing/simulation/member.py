"""Links to the simulated coordinator: a member's, which joins, beats, comes back, and keeps what it could not say; and
an observer's, which says one order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from rallypoint.core import protocol
from rallypoint.core.protocol import Beat, Hello, Message, NewView, Resize, decode, encode
from rallypoint.core.shard.clip import Measure
from rallypoint.core.view import Member
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.net.member import LastReports, ViewReceiver
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import RETRY_S, Node, Wire

COORDINATOR = "coordinator"
BEAT_S = 0.5


class SimulatedMembership:
    """Hands every message that comes to `on_message`; `on_admitted(new)` says whether we are somebody new."""

    def __init__(
        self, node: Node, role: str, on_message: Callable[[Any], None], on_admitted: Callable[[bool], None],
        address: str = "", beat: Callable[[], Beat] = Beat, snapshots: str = "",
    ) -> None:  # fmt: skip
        self._say_beat, self.welcome = beat, protocol.Welcome(snapshots=snapshots)
        self.credentials = SimpleNamespace(me=Member(node.name, "host"))
        self.node, self.role, self.address, self.incarnation = node, role, address, 0
        self._on_message, self._on_admitted = on_message, on_admitted
        self._wire: Wire | None = None
        self._admitted = False
        self._knows, self._views = protocol.Knows(), ViewReceiver()  # the newest view; those of the connection
        self._unsent: deque[Message] = deque()
        self._reports = LastReports()
        self._connect()
        self._beat()

    def send(self, message: Message) -> None:
        """Say something, now or when the coordinator can hear it."""
        self._reports.note(message)
        if self._wire is not None and self._admitted:
            self._wire.send(0, message)
        else:
            self._unsent.append(message)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close(0)

    def _beat(self) -> None:
        if self._wire is not None and self._admitted:
            self._wire.send(0, with_paces(self._say_beat(), self.node, self.role))
        self.node.later(BEAT_S, self._beat)

    def _connect(self) -> None:
        name = self.node.name  # no other process has it
        hello = Hello(self.role, name, "host", self.address, self.incarnation, process=name.encode())
        self.node.world.connect(self.node, COORDINATOR, hello, self._up, self._failed)

    def _failed(self, reason: str) -> None:
        if reason != "the job is over":
            self.node.later(RETRY_S, self._connect)

    def _up(self, wire: Wire) -> None:
        self._wire, self._admitted, self._views = wire, False, ViewReceiver()
        wire.on_message[0] = self._receive
        wire.on_close[0] = self._lost
        if self.incarnation:
            wire.send(0, self._knows)

    def _lost(self) -> None:
        self._wire, self._admitted = None, False
        self.node.later(RETRY_S, self._connect)

    def _receive(self, message: Any) -> None:
        if isinstance(message, NewView | protocol.ViewChange):
            arrived = decode(encode(message))  # as from a socket: where a float belongs, a whole number becomes one
            assert isinstance(arrived, NewView | protocol.ViewChange), arrived
            message = self._views.take(arrived)
        known = self._knows.view
        if isinstance(message, NewView) and (known is None or message.view.number > known.number):
            self._knows = protocol.Knows(message.view, message.proof)
            self.node.world.note("view", self.node.name, -1, -1, message.view.number, more=message.view)
        match message:
            case protocol.Admitted(incarnation=incarnation):
                new, self.incarnation = incarnation != self.incarnation, incarnation
                self._admitted = True
                if new:
                    self._knows = protocol.Knows()
                    self._unsent.clear()  # said by somebody who was given up
                    self._reports.forget()
                assert self._wire is not None
                for report in self._reports.again({id(message) for message in self._unsent}):
                    self._wire.send(0, report)
                self._on_admitted(new)
                while self._unsent:
                    self._wire.send(0, self._unsent.popleft())
            case _:
                self._on_message(message)


# ---- what members say of servers' links, where they are not alike and change ----

_SPEEDS = (0.05, 0.3, 0.5, 1.0, 1.0, 1.0, 3.0)
_CHANGES_S = 1.1  # so long a link stays as it is
_NONSENSE = (0.0, 0.0, 1e-9, 1e15, 1e15, 1.0)  # others than these are refused as they arrive


def with_paces(beat: Beat, node: Node, role: str) -> Beat:
    """The beat with what its sender has measured of servers' links. Every seventh member tells nonsense."""
    world = node.world
    if not world.uneven:
        return beat
    period = int(world.now / _CHANGES_S)
    servers = [name for name in world.nodes if name.startswith("server")] if role != "server" else [node.name]
    chance = random.Random(f"{node.name} {period}")
    if chance.random() < 1 / 7:
        lies = {server: (chance.choice(_NONSENSE), min(1.0, chance.choice(_NONSENSE))) for server in servers}
        return msgspec.structs.replace(beat, paced=lies)
    speeds = {server: random.Random(f"{server} {period}").choice(_SPEEDS) for server in servers}
    return msgspec.structs.replace(beat, paced={server: (1e6 * speed, 0.9) for server, speed in speeds.items()})


class Given:
    """One order, given to the coordinator until it is answered (a resize: announced): `heard(answer, again)`; `again`:
    an answer was lost before this one."""

    def __init__(self, node: Node, order: protocol.AnyOrder | Resize, heard: Callable[[Any, bool], None]) -> None:
        self._node, self._order, self._heard, self._again = node, order, heard, False
        self._connect()

    def _connect(self) -> None:
        hello = Hello("observer", self._node.name, "host", "", 0)
        self._node.world.connect(self._node, COORDINATOR, hello, self._up, lambda _: self._retry())

    def _retry(self) -> None:
        self._node.later(RETRY_S, self._connect)

    def _up(self, wire: Wire) -> None:
        wire.on_message[0] = lambda message: self._receive(wire, message)
        wire.on_close[0] = self._lost
        wire.send(0, self._order)

    def _lost(self) -> None:
        self._again = True
        self._retry()

    def _receive(self, wire: Wire, message: Any) -> None:
        answers = isinstance(message, protocol.Ordered) and message.kind == type(self._order).__name__
        if not (message == self._order if isinstance(self._order, Resize) else answers):
            return
        wire.on_message[0], wire.on_close[0] = lambda _: None, lambda: None
        wire.close(0)
        if isinstance(message, protocol.Ordered) and "too many orders" in message.text:
            self._retry()
        else:
            self._heard(message, self._again)


class SimulatedOrders:
    """Gives the coordinator one order after the other; calls `heard(order)` when it has announced it.

    An order waits until the one before it is announced: each has a link of its own, two links might announce them in
    another order, and the real launcher has one.
    """

    def __init__(self, new_node: Callable[[], Node], heard: Callable[[Resize], None]) -> None:
        self._new_node, self._heard = new_node, heard
        self._waiting: deque[Resize] = deque()  # the first is being given

    def give(self, order: Resize) -> None:
        """Give this order, after those before it."""
        self._waiting.append(order)
        if len(self._waiting) == 1:
            self._give_first(self._new_node())

    def _give_first(self, node: Node) -> None:
        def announced(*_: Any) -> None:
            node.kill()
            self._heard(self._waiting.popleft())
            if self._waiting:
                self._give_first(self._new_node())

        Given(node, self._waiting[0], announced)


# ---- what members send that nobody may send: that connection ends, and nothing else changes (I9) ----

MALFORMED = "malformed"  # a kind of fault
_HUGE, _PUSH = 1 << 20, Header(Kind.PUSH, length=64, weight=1.0)
_TEXTS = b"\xff" * 8, b"\x92\0\0", msgspec.msgpack.encode([Measure(0, (-1.0,))])

# What a frame has that is wrong in place of what a contribution has, by who sends it.
_OF_WORKERS: tuple[dict[str, Any], ...] = (
    {"shard": _HUGE}, {"length": _HUGE}, {"weight": 0.0}, {"step": _HUGE}, {"replica": _HUGE}, {"flags": SKIP},
    {"wants": _HUGE}, {"replica": 1, "base": _HUGE, "wants": _HUGE}, {"kind": Kind.ROWS}, {"kind": Kind.WANT},
    {"kind": Kind.FETCH, "shard": _HUGE}, {"kind": Kind.INITIAL, "step": _HUGE}, {"kind": Kind.STATE, "step": _HUGE},
    {"kind": Kind.CODEC_STATE, "replica": _HUGE}, {"kind": Kind.PULL_WORDS, "wants": _HUGE},
    {"kind": Kind.PULL_ROWS, "length": 8},
)  # fmt: skip
_OF_SERVERS = (
    {"shard": _HUGE}, {"kind": Kind.PROVE, "shard": _HUGE}, {"kind": Kind.REPLICATE, "weight": 0.0},
    {"kind": Kind.MEASURES}, {"kind": Kind.CHOICE}, {"kind": Kind.STATE},
)  # fmt: skip
_OF_ACCEPTORS = (
    {"kind": Kind.VERSION, "shard": _HUGE}, {"kind": Kind.VERSION, "length": _HUGE}, {"kind": Kind.ROWS},
    {"kind": Kind.CREDIT, "replica": _HUGE},
)  # fmt: skip


def send_malformed(node: Node, job: SimulatedJob) -> str:
    """Send somebody such a frame, or the coordinator such a message: it gives the sender up. Returns what and to whom.
    """
    world, ways, sent = node.world, list[tuple[Wire, int, Any, str]](), cast(Any, None)
    for wire in node.wires if not node.paused else ():
        end = wire.ends.index(node)
        to = wire.ends[1 - end].name
        views = getattr(world.acceptors.get(to), "_views", None)
        if wire.malformed is None and (to == COORDINATOR or (views is not None and views.view is not None)):
            ways.append((wire, end, views, to))
    if not ways:
        return "nobody sends what is malformed"
    wire, end, views, to = world.random.choice(ways)
    if to == COORDINATOR:
        wire.malformed = sent = world.random.choice(_messages(job))
    else:
        kinds = _OF_ACCEPTORS if end else _OF_SERVERS if node.name.startswith("server") else _OF_WORKERS
        refused = ({"kind": Kind.INITIAL},) if to.startswith("aggregator") and not end else ()
        wire.malformed = _PUSH._replace(view=views.number, **world.random.choice((*kinds, *refused)))
        others = wire.malformed.kind in (Kind.MEASURES, Kind.CHOICE)
        sent = wire.malformed, world.random.choice(_TEXTS) if others else _TEXTS[0]
    wire.send(end, sent)
    return f"{node.name} sends {to} what is malformed: {wire.malformed}"


def _messages(job: SimulatedJob) -> list[Message]:
    settings, rounds = job.record.config, job.record.rounds
    changes: Any = {"config": {}}, {"config": {**settings, "replicas": 0}}, {"rounds": rounds + 1}, {"threads": _HUGE}
    proposed = [protocol.Propose(msgspec.structs.replace(job.record, **change)) for change in changes]
    return [*proposed, protocol.Finished(), protocol.Report(0, 0, 0.0, 0.0, 1), Beat({"server": -1.0})]
