"""A server's connections: workers that push and follow, other servers that tell their measures, the coordinator."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from rallypoint.config import JobConfig, parse
from rallypoint.core import clip
from rallypoint.core.job import JobRecord
from rallypoint.core.view import View, ViewNumber
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import introduce
from rallypoint.net.member import CoordinatorLink
from rallypoint.net.messages import (
    Aborted,
    Finished,
    GiveUp,
    Hello,
    Message,
    Prepare,
    Prepared,
    Skipped,
    Welcome,
)
from rallypoint.net.pool import BufferPool
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.trace import Tracer
from rallypoint.server.reducer import Reducer

CONNECT_TIMEOUT_S = 10.0


class ServerService:
    """One reduction server of one job, from joining to the end.

    `start` returns once the coordinator has welcomed it; `wait` blocks until the job is over and returns the sentence
    with which it failed, or None.
    """

    def __init__(
        self, *, id: str, coordinator: str, token: str = "", bind: str = "127.0.0.1:0",
        transport: Transport | None = None,
    ) -> None:  # fmt: skip
        self.id = id
        self._coordinator, self._token, self._bind = coordinator, token, bind
        self._transport: Transport = transport or TcpTransport()
        self._tracer = Tracer(id)
        self._folder = ""
        self._trace_steps = (0, 0)
        self._job: tuple[JobRecord, JobConfig, View] | None = None
        self._pool: BufferPool | None = None
        self._prepared = threading.Event()
        self._over = threading.Event()
        self._failure: str | None = None
        self._peers: dict[str, Channel] = {}
        self._reducer = Reducer(
            tracer=self._tracer, tell=self._tell_peers, not_finite=self._on_not_finite, failed=self._on_reducer_failed
        )

    def start(self) -> None:
        """Listen, join the coordinator. AddressInUse, AccessDenied or LinkError when that fails."""
        self._gate = Gate(self._transport, self._bind, self._token, self._admit, self._serve, self._tracer)
        try:
            self._link = CoordinatorLink(
                transport=self._transport, address=self._coordinator, token=self._token, role="server", id=self.id,
                listening_at=self._gate.address, on_message=self._on_message, on_lost=self._on_coordinator_lost,
            )  # fmt: skip
        except BaseException:
            self._gate.close()
            self._reducer.stop()
            raise
        self._folder, self._trace_steps = self._link.welcome.folder, self._link.welcome.trace
        self._link.start()

    def wait(self) -> str | None:
        """Until the job is over: None, or why it failed."""
        self._over.wait()
        return self._failure

    def close(self) -> None:
        """End every connection and thread. May be called at any time after `start`."""
        self._end(None)
        self._gate.close()
        for peer in self._peers.values():
            peer.close()
        self._link.close()
        self._reducer.stop()
        if self._folder:
            self._tracer.save(Path(self._folder))

    def _end(self, failure: str | None) -> None:
        if not self._over.is_set():
            self._failure = failure
            self._over.set()
            self._prepared.set()

    # ---- the coordinator's words ----

    def _on_message(self, message: Message) -> None:
        match message:
            case Prepare(record=record, view=view):
                try:
                    self._prepare(record, view)
                except RallypointError as error:  # of ours or a peer's making: the coordinator is not to blame
                    self._give_up(f"server {self.id} could not prepare: {error}")
            case Finished():
                self._end(None)
            case Aborted(reason=reason):
                self._end(reason)
            case _:
                raise ProtocolError(f"a server has no use for a {type(message).__name__} message")

    def _on_coordinator_lost(self, error: RallypointError) -> None:
        self._end(f"the coordinator is gone: {error}")

    def _prepare(self, record: JobRecord, view: View) -> None:
        config = parse(record.config)
        self._job = (record, config, view)
        self._pool = BufferPool(record.layout.largest_shard)
        if config.decides:
            for member in view.servers:
                if member.id != self.id:
                    self._peers[member.id] = self._connect_peer(member.id, member.address)
        self._reducer.inbox.put(lambda: self._reducer.prepare(record, config, view, self.id))
        self._prepared.set()
        self._link.send(Prepared())

    def _connect_peer(self, peer: str, address: str) -> Channel:
        connection = self._transport.connect(address, CONNECT_TIMEOUT_S)
        try:
            introduce(connection, self._token, role="server", id=self.id, host=socket.gethostname())
        except BaseException:
            connection.close()
            raise
        return Channel(connection, peer, self._tracer)

    # ---- the reducer's words ----

    def _tell_peers(self, tell: clip.Tell) -> None:
        data = memoryview(msgspec.msgpack.encode(tell.measures))
        for peer in self._peers.values():
            peer.send(Header(Kind.MEASURES, self._number, step=tell.step, length=len(data)), data, urgent=True)

    def _on_not_finite(self, verdict: clip.Verdict) -> None:
        assert self._job is not None
        _, config, view = self._job
        if view.primary[0] != self.id:
            return  # all servers see the same: one of them speaks
        if verdict.scale is None:
            self._link.send(Skipped(verdict.step, verdict.not_finite))
        elif config.nonfinite == "stop":
            self._link.send(
                GiveUp(
                    f"the gradient of step {verdict.step} is not finite although every loss was; lower the learning "
                    "rate, or set nonfinite to 'skip' or 'continue'"
                )
            )

    def _on_reducer_failed(self, error: BaseException) -> None:
        self._give_up(f"server {self.id} failed: {type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        self._link.send(GiveUp(reason))
        self._end(reason)

    # ---- connections ----

    def _admit(self, hello: Hello) -> Welcome:
        if hello.role not in ("worker", "server"):
            raise AccessDenied(f"a {hello.role} has no business with a server")
        return Welcome()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        """Receive one connection's frames until it ends. Runs in that connection's own thread."""
        self._prepared.wait()  # a worker may be quicker than our own Prepare
        self._check_member(hello)
        try:
            while not self._over.is_set():
                header = channel.receive_header()
                if hello.role == "server":
                    self._receive_measures(channel, header, hello.id)
                else:
                    self._receive_from_worker(channel, header)
        finally:
            self._reducer.inbox.put(lambda: self._reducer.unfollow(channel))

    def _check_member(self, hello: Hello) -> None:
        """ProtocolError for whoever has the token but no part in this job's view."""
        if self._job is None:
            return
        _, _, view = self._job
        members = view.servers if hello.role == "server" else view.workers
        if hello.id not in {member.id for member in members}:
            raise ProtocolError(f"{hello.role} {hello.id} is not in view {view.number}")

    def _receive_measures(self, channel: Channel, header: Header, sender: str) -> None:
        assert self._job is not None
        _, config, view = self._job
        if header.kind is not Kind.MEASURES:
            raise ProtocolError(f"a {header.kind.name} frame from another server")
        try:
            measures = msgspec.msgpack.decode(channel.receive_bytes(header), type=list[clip.Measure])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"measures that cannot be read: {error}") from None
        if header.step >= config.steps or any(view.primary.get(m.shard) != sender for m in measures):
            raise ProtocolError(f"server {sender} told measures that are not its own to tell")
        if not self._stale(header):
            self._reducer.inbox.put(lambda: self._reducer.told(header.step, measures))

    def _receive_from_worker(self, channel: Channel, header: Header) -> None:
        self._tracer.on = self._trace_steps[0] <= header.step < self._trace_steps[1]
        match header.kind:
            case Kind.PUSH | Kind.INITIAL:
                self._receive_payload(channel, header)
            case Kind.FOLLOW:
                self._reducer.inbox.put(lambda: self._reducer.follow(channel))
            case Kind.FETCH:
                self._reducer.inbox.put(lambda: self._reducer.fetch(channel, header.shard, header.step))
            case _:
                raise ProtocolError(f"a {header.kind.name} frame from a worker")

    def _receive_payload(self, channel: Channel, header: Header) -> None:
        assert self._pool is not None
        self._check_payload(header)
        buffer = self._pool.take()
        try:
            with self._tracer.span("receive", shard=header.shard, replica=header.replica, step=header.step):
                channel.receive_into(buffer.bytes[: header.length])
        except LinkError:
            buffer.release()
            raise
        if self._stale(header):
            buffer.release()
            channel.send(Header(Kind.CREDIT, self._number, replica=1), urgent=True)
        elif header.kind is Kind.PUSH:
            self._reducer.inbox.put(lambda: self._reducer.contribute(channel, header, buffer))
        else:
            self._reducer.inbox.put(lambda: self._reducer.initialise(channel, header, buffer))

    def _check_payload(self, header: Header) -> None:
        """ProtocolError unless the frame carries exactly one shard of ours, with a sensible weight."""
        assert self._job is not None
        record, _, view = self._job
        if view.primary.get(header.shard) != self.id:
            raise ProtocolError(f"shard {header.shard} is not on server {self.id}")
        expected = record.layout.shards[header.shard].nbytes
        if header.length != expected:
            raise ProtocolError(f"{header.length} bytes for shard {header.shard}, which has {expected}")
        if header.kind is Kind.PUSH and header.weight <= 0:
            raise ProtocolError(f"a contribution of weight {header.weight}: weights are positive")

    @property
    def _number(self) -> ViewNumber:
        return self._job[2].number if self._job is not None else ViewNumber()

    def _stale(self, header: Header) -> bool:
        return header.view.epoch < self._number.epoch  # from before a roll-back: nobody accepts it (I10)


def run_servers(services: Sequence[ServerService]) -> str | None:
    """Start these servers, wait until their job is over, close them: None, or why it failed."""
    with ExitStack() as started:
        for service in services:
            service.start()
            started.callback(service.close)
        failures = [service.wait() for service in services]
    return next((failure for failure in failures if failure is not None), None)
