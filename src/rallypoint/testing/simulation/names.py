"""What a simulated server's own reducer holds and sends: names of tensors, wires in place of channels.

`server/reducer.py` and its parts are the product's own; here is what they are given: buffers and channels (`shards.py`
has the shards).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch

from rallypoint.core.layout import Shard
from rallypoint.core.protocol import Finished, Prepare, Refused, encode
from rallypoint.core.view import Member, ViewNumber
from rallypoint.errors import LinkError, ProtocolError, RallypointError
from rallypoint.net.dialer import Calls
from rallypoint.net.frames import Header, Kind
from rallypoint.net.pool import Buffer
from rallypoint.net.transport import Transport
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.server.intake import Intake
from rallypoint.server.job import ServerJob
from rallypoint.server.member import ListeningMember, Receive, Views
from rallypoint.store.record import decode_record
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import COORDINATOR, SimulatedMembership
from rallypoint.testing.simulation.network import RETRY_S, Call, Node, Tokens, Wire
from rallypoint.testing.simulation.replicas.contents import Content
from rallypoint.worker.exchange.links import ExchangeContext

NBYTES = 64  # of every payload, but for a table's first version
TOKEN = 8  # bytes that stand for a name where memory is real
Frame = tuple[Header, Any]


class NamedPool:
    """Buffers for names, in place of `net.pool.BufferPool` and `BufferPools`. `held`: those that somebody holds."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job, self.held = job, 0

    def take(self, nbytes: int = 0) -> NamedBuffer:
        self.held += 1
        return NamedBuffer(None, self)


class NamedBuffer:
    """A payload with its holders, as `net.pool.Buffer` counts them; its bytes, its tensor and parts of them are itself.

    Attributes:
        real: the product's buffer with the floats that the name stands for, and these floats; None: there is none.
    """

    real: tuple[Buffer, torch.Tensor] | None = None
    nbytes = NBYTES

    def __init__(self, content: Content, pool: NamedPool | None = None) -> None:
        """Without a pool it belongs to somebody who keeps it: nobody holds it."""
        self._content, self._pool, self._holders = content, pool, 0 if pool is None else 1
        self.bytes = self.tensor = self

    @property
    def content(self) -> Content:
        """The name. AssertionError if the memory has other floats by now."""
        if self.real is not None:
            buffer, floats = self.real
            words = buffer.tensor[: len(floats)]
            assert torch.equal(words, floats), f"the memory of {self._content} has other floats"
        return self._content

    @content.setter
    def content(self, content: Content) -> None:
        self._content = content

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> NamedBuffer:
        return self

    def add_(self, other: NamedBuffer) -> None:
        assert self._pool is not None
        self.content = self._pool.job.add(self.content, other.content)

    def retain(self) -> NamedBuffer:
        self._holders += 1
        if self.real is not None:
            self.real[0].retain()
        return self

    def release(self) -> None:
        self._holders -= 1
        if self.real is not None:
            self.real[0].release()
        assert self._holders >= 0, "a buffer was released more often than it was held"
        if not self._holders and self._pool is not None:
            self._pool.held -= 1


def named_job(job: SimulatedJob) -> ServerJob:
    """The job as servers and aggregators need it, with buffers for names."""
    whole, pool = ServerJob(job.record, job.config), NamedPool(job)
    whole.__dict__.update(pool=pool, pools=pool)
    return whole


class NamedIntake(Intake):
    """Reads frames of names."""

    def __init__(self, job: ServerJob, *about: Any) -> None:
        super().__init__(job, *about)
        record = self._checks.record  # a state of names is no tensor that could fit
        self._checks.record = (  # type: ignore[method-assign]
            lambda header, data: record(header, data) if len(data) <= TOKEN else decode_record(bytes(data))
        )
        if (audits := job.plan.audits) is not None:
            cast(Any, self)._pushed = lambda channel, worker, header, buffer: inbox.Pushed(
                channel, worker, header, buffer, str(buffer.content).encode() if audits.audited(header.step) else b""
            )

    def _room(self, header: Header, place: Shard) -> Buffer:
        return self._job.pool.take()

    def _check_values(self, buffer: Buffer, header: Header, place: Shard) -> None:
        """Names are no rows and no records."""

    def _decode_into(self, buffer: Buffer, channel: Any, header: Header, place: Shard) -> Header:
        channel.receive_into(buffer)
        return header._replace(codec=0, length=NBYTES)


class NothingMore(LinkError):
    """All that has come is received: a real thread would wait here."""


def payload_of(tokens: Tokens, content: Content, nbytes: int = NBYTES) -> memoryview:
    """So many bytes that stand for a name."""
    return memoryview(bytearray(tokens.bytes_of(content)[:nbytes]).ljust(nbytes, b"\0"))


class WireChannel:
    """One end of a wire that carries frames, each a header and a name: what `net.channel.Channel` is to real ones.

    What the accepting end sends leaves at once. From the other end (0) payloads leave one after the other, and are read
    then: who changes them before sends something else.

    Attributes:
        owed: credits that the other end is owed for its payloads.
        asked: shard and pull -> the rows, or the step and the replica that it is for.
    """

    def __init__(self, wire: Wire, end: int, name: str, views: Views | None = None) -> None:
        """`views`: a frame of a view that has not come waits for it, and what comes behind it too."""
        self.name, self.number = name, wire.number
        self.connection = SimpleNamespace(
            close=lambda: wire.close(end), limit_in_flight=id, share_port=id, pace=id, set_timeout=id
        )
        self.wire, self.owed, self.fault = wire, 0, None
        self.asked: dict[tuple[int, int], Any] = {}
        self._end, self._views, self._node = end, views, wire.ends[end]
        self._waiting, self._over, self._owes = deque[Frame](), False, False
        self._frame: Frame | None = None
        self._header = Header(Kind.CREDIT)
        self._paused, self._leaves, self._repeats = False, 0.0, 0

    # ---- receiving ----

    def listen(self, receive: Call, gone: Call, *, owes: bool = False) -> None:
        """Take what comes from now on. `owes`: its payloads have taken a credit."""
        self._receive, self._gone, self._owes = receive, gone, owes
        self.wire.on_message[self._end], self.wire.on_close[self._end] = self._came, self._ended

    def _came(self, frame: Frame) -> None:
        self._waiting.append(frame)
        self.drain()

    def _ended(self) -> None:
        self._over = True
        if not self._end:
            self._waiting.clear()
        self.drain()

    def pause(self, seconds: float, then: Call) -> None:
        """The payload of the frame in progress takes so long to come; call `then` unless the wire has ended."""
        self._paused = True

        def whole() -> None:
            self._paused = False
            if self.wire.open and not self._over:
                then()
                self.drain()

        self._node.later(seconds, whole)

    def drain(self) -> None:
        """Receive what has come, as far as its views have."""
        while self._waiting and not self._paused:
            if self._views is not None and not self._views._fence.has_come(self._waiting[0][0].view):
                return
            self._frame = self._waiting.popleft()
            self.owed += self._owes and self._frame[0].kind in (Kind.PUSH, Kind.INITIAL, Kind.STATE)
            self._receive()
        if self._over and not self._waiting:
            self._over, self._paused = False, True
            self._gone()

    def receive_header(self) -> Header:
        if self._frame is None:
            raise NothingMore
        (header, self._content), self._frame = self._frame, None
        if header.kind is Kind.CREDIT and self._repeats:
            given = max(0, header.replica - self._repeats)
            header, self._repeats = header._replace(replica=given), self._repeats - header.replica + given
        self._header = header
        return header

    @property
    def view(self) -> ViewNumber:
        return self._header.view

    def receive_bytes(self, header: Header) -> bytearray:
        if header.kind is Kind.PULL_ROWS:
            self.asked[header.shard, header.base] = self._content
            return bytearray(self._content)
        if self._content is None or isinstance(self._content, bytes | memoryview):
            return bytearray(self._content or b"")
        data = bytearray(NBYTES)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, place: Any) -> None:
        """Its payload, into a buffer, or (what stands for it) into memory."""
        if isinstance(place, memoryview):
            if len(place):
                place[:TOKEN] = self._node.world.tokens.bytes_of(self._content)
        elif self._header.kind is Kind.STATE:
            place.content = self._node.world.tokens.of(decode_record(bytes(self._content)).arrays["master"])
        else:
            place.content = self._content

    # ---- sending ----

    def send(
        self, header: Header, payload: Any = None, sent: Call | None = None, *, place: Hashable = None,
        rank: object = (), urgent: bool = False, left: Call | None = None,
    ) -> None:  # fmt: skip
        if header.kind is Kind.CREDIT:
            self.owed -= header.replica
            assert self.owed >= 0, f"{self.name} gets a credit too many"
        world = self._node.world

        def leave() -> None:
            content = self._content_of(header, payload)
            self.wire.send(self._end, (header, content), place=place)
            if header.kind is Kind.PUSH and not self._end:
                world.note("pushes", self._node.name, header.shard, header.step, header.view, self.name)
                if world.random.random() < 0.02:
                    self.wire.send(self._end, (header, content))
                    self._repeats += 1
            if left is not None:
                left()

        if self._end or urgent:
            leave()
            if sent is not None:
                sent()
            return
        self._leaves = max(self._leaves, world.now + (world.latency() / 4 if payload is not None else 0.0))
        self._node.later(self._leaves - world.now, leave)
        if sent is None:
            return

        def has_left() -> None:
            self._node.sending -= 1
            sent()

        self._node.sending += 1
        self._node.later(self._leaves - world.now + world.latency() / 4, has_left)

    def _content_of(self, header: Header, payload: Any) -> Any:
        if isinstance(payload, memoryview) and header.kind in (Kind.PUSH, Kind.INITIAL):
            return self._node.world.tokens.of(payload[-NBYTES:][:TOKEN]) if len(payload) else None
        return getattr(payload, "content", payload)

    def refuse(self, reason: str) -> None:
        """End the connection because of what has come."""
        said = memoryview(encode(Refused(reason)))
        self.wire.send(self._end, (Header(Kind.REFUSE, self.view, length=len(said)), said))
        self._waiting.clear()
        self.wire.refuse(self._end, reason)


class SimulatedDialer:
    """What `net.dialer.Dialer` is to real processes."""

    trouble = ""

    def __init__(self, *, transport: SimulatedTransport, peer: Member, credentials: Any, calls: Calls, tracer: Tracer):
        self.peer, self._of, self._node, self._calls = peer, transport, transport.node, calls
        self._wire: Wire | None = None
        self._closed, self._lost_at = False, transport.node.world.now

    def start(self) -> None:
        if not self._closed:
            hello = (self._of.role, self._node.name, self._calls.view())
            self._node.world.connect(self._node, self.peer.address, hello, self._up, self._failed)

    def unreachable(self) -> float:
        return 0.0 if self._wire is not None else self._node.world.now - self._lost_at

    def close(self) -> None:
        self._closed = True
        if self._wire is not None:
            self._wire.close(0)
            self._wire = None

    def _failed(self, _: str) -> None:
        self._node.later(RETRY_S, self.start)

    def _up(self, wire: Wire) -> None:
        if self._closed:
            wire.close(0)
            return
        self._wire, channel = wire, WireChannel(wire, 0, self.peer.id, self._of.views)
        self._of.channels[:] = [*(known for known in self._of.channels if known.wire.open), channel]

        def receive() -> None:
            try:
                self._calls.serve(cast(Any, channel))
            except NothingMore:
                pass
            except RallypointError as error:
                wire.refuse(0, str(error))
                wire.close(0)
                self._lost(error)

        channel.listen(receive, self._lost)
        self._calls.up(cast(Any, channel))

    def _lost(self, error: RallypointError | None = None) -> None:
        self._wire, self._lost_at = None, self._node.world.now
        self._calls.down(error or LinkError("it broke"))
        self.start()


@dataclass
class SimulatedTransport:
    """How a process reaches others. With `views` what it hears waits for them, in `channels`."""

    node: Node
    role: str
    views: Views | None = None
    channels: list[WireChannel] = field(default_factory=list)
    dialer: ClassVar[type[SimulatedDialer]] = SimulatedDialer

    @property
    def context(self) -> ExchangeContext:
        """What an exchange needs of this process."""
        me: Any = SimpleNamespace(me=Member(self.node.name, "host"))
        return ExchangeContext(me, cast(Transport, self), Tracer(self.node.name), lambda said: None)


class PlayedMember(ListeningMember):
    """A server or an aggregator: the product's, without sockets and threads. Its owner takes events as they come."""

    def __init__(self, node: Node, job: SimulatedJob, snapshots: str = "") -> None:
        self.node = node
        self._owner_of = cast(Any, lambda failed: SimpleNamespace(put=self._take, alone=False))
        transport: Any = SimulatedTransport(node, self.role)
        super().__init__(id=node.name, coordinator=COORDINATOR, transport=transport)
        self.channels, backlog = transport.channels, SimpleNamespace(allow=lambda *most: None)
        self._gate = cast(Any, SimpleNamespace(backlog=backlog))
        self.membership = SimulatedMembership(
            node, self.role, self._on_message, self._on_admitted, node.name, self._beat, snapshots
        )
        self._link = cast(Any, self.membership)
        self._on_message(Prepare(job.record))
        node.world.acceptors[node.name] = cast(Any, self)

    def failed(self, error: BaseException) -> None:
        raise error

    def _take(self, event: Any) -> None:
        raise NotImplementedError

    def _receive(self, channel: WireChannel, receive: Receive, who: str) -> None:
        """Receive a frame. A malformed one ends its connection, and changes nothing."""
        malformed = channel._frame is not None and channel._frame[0] is channel.wire.malformed
        machine: Any = self.machine  # type: ignore[attr-defined]
        before = repr(machine) if malformed else ""
        try:
            receive(cast(Any, channel), who)
        except ProtocolError as error:
            channel.refuse(str(error))
        harmless = not malformed or (not channel.wire.open and repr(machine) == before)
        assert harmless, f"{self.node.name} takes {channel.wire.malformed} of {who}"

    def _on_message(self, message: Any) -> None:
        super()._on_message(message)
        for channel in list(self.channels):
            channel.drain()
        if isinstance(message, Finished):
            self.membership.close()
            self.node.kill()
