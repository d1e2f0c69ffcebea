"""A server's connections: workers that push and follow, other servers that tell and replicate, the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import msgspec

from rallypoint.codec.rows import check_gradient, decode_ids, gradient_bytes
from rallypoint.codec.shards import ShardCodecs
from rallypoint.codec.state import ShardCodecStates
from rallypoint.config import JobConfig, parse
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Shard
from rallypoint.core.shard import clip
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.errors import AccessDenied, DamagedSnapshot, LinkError, ProtocolError, RallypointError
from rallypoint.net.advertise import advertised
from rallypoint.net.channel import Channel
from rallypoint.net.dialer import Dialer
from rallypoint.net.frames import NOT_FINITE, SKIP, Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.member import CoordinatorLink
from rallypoint.net.messages import (
    Aborted,
    Capture,
    Finished,
    GiveUp,
    Hello,
    Message,
    NewView,
    Prepare,
    Refused,
    Skipped,
    Welcome,
    expect,
)
from rallypoint.net.pool import Buffer, BufferPool, BufferPools
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport
from rallypoint.observe.trace import Tracer
from rallypoint.server.owned import fits
from rallypoint.server.reducer import Reducer
from rallypoint.server.rows import fits_rows
from rallypoint.store.manifest import Compression
from rallypoint.store.record import decode_record
from rallypoint.store.state import read_state
from rallypoint.store.writer import SnapshotWriter

VIEW_TIMEOUT_S = 60.0  # a coordinator may be away for a while
_measures = msgspec.msgpack.Decoder(list[clip.Measure])


class ServerService:
    """One reduction server of one job, from joining to the end.

    `start` returns once the coordinator has welcomed it; `wait` blocks until the job is over and returns the sentence
    with which it failed, or None.
    """

    def __init__(
        self, *, id: str, coordinator: str, token: str = "", bind: str = "127.0.0.1:0",
        advertise: str = "", transport: Transport | None = None,
    ) -> None:  # fmt: skip
        self.id = id
        self._coordinator, self._token, self._bind, self._advertise = coordinator, token, bind, advertise
        self._transport: Transport = transport or TcpTransport()
        self._tracer = Tracer(id)
        self._job: tuple[JobRecord, JobConfig] | None = None
        self._view: View | None = None
        self._pool: BufferPool | None = None
        self._pools = BufferPools()  # of tables: their payloads are of any length
        self._changed = threading.Condition()  # a new view, or the end
        self._over = threading.Event()
        self._failure: str | None = None
        self._decoders = threading.local()  # codecs of their own for each connection's thread
        self._formats: ShardCodecStates | None = None
        self._peers: dict[tuple[str, int], Dialer] = {}
        self._reducer = Reducer(me=id, tracer=self._tracer, context=self)

    def start(self) -> None:
        """Listen, join the coordinator. AddressInUse, AccessDenied or LinkError when that fails.

        UsageError for an address to advertise that nobody could connect to.
        """
        self._gate = Gate(self._transport, self._bind, self._token, self._admit, self._serve, self._tracer)
        try:
            self._link = CoordinatorLink(
                transport=self._transport, address=self._coordinator, token=self._token, role="server", id=self.id,
                listening_at=advertised(self._gate.address, self._advertise, self._coordinator),
                on_message=self._on_message, on_lost=self._on_coordinator_lost,
                on_admitted=lambda new: self._reducer.inbox.put(lambda: self._reducer.admitted(new)),
            )  # fmt: skip
        except BaseException:
            self._gate.close()
            self._reducer.stop()
            raise
        self._link.start()

    def wait(self) -> str | None:
        """Until the job is over: None, or why it failed."""
        self._over.wait()
        return self._failure

    def close(self) -> None:
        """End every connection and thread. May be called at any time after `start`."""
        self._end(None)
        self._gate.close()
        self._link.close()
        for peer in self._peers.values():
            peer.close()
        self._reducer.stop()
        if self._link.welcome.folder:
            self._tracer.save(Path(self._link.welcome.folder))

    def _end(self, failure: str | None) -> None:
        with self._changed:
            if not self._over.is_set():
                self._failure = failure
                self._over.set()
                self._changed.notify_all()

    # ---- the coordinator's words ----

    def _on_message(self, message: Message) -> None:
        match message:
            case Prepare(record=record):
                self._prepare(record)
            case NewView(view=view):
                self._adopt(view)
            case Capture(snapshot=snapshot, version=version):
                self._reducer.inbox.put(lambda: self._reducer.capture(snapshot, version))
            case Finished():
                self._end(None)
            case Aborted(reason=reason) | Refused(reason=reason):
                self._end(reason)
            case _:
                raise ProtocolError(f"a server has no use for a {type(message).__name__} message")

    def _on_coordinator_lost(self, error: RallypointError) -> None:
        self._end(f"the coordinator is gone: {error}")

    def _prepare(self, record: JobRecord) -> None:
        if self._job is not None:
            return  # said again to somebody who had been given up
        config, about = parse(record.config), self._link.welcome
        self._job = (record, config)
        pool = self._pool = BufferPool(record.layout.largest_shard)
        writer = None
        if about.snapshots:
            writer = SnapshotWriter(about.snapshots, cast(Compression, about.compression), self.id, self._link.send)
        pools, url = self._pools, about.snapshots
        self._reducer.inbox.put(lambda: self._reducer.prepare(record, config, pool, pools, writer, url))

    def _adopt(self, view: View) -> None:
        if self._job is None or (self._view is not None and view.number <= self._view.number):
            return
        self._reducer.inbox.put(lambda: self._reducer.adopt(view))
        with self._changed:
            self._view = view  # from now on what waited for this view goes into the inbox, behind it
            self._changed.notify_all()
        self._dial_peers(view)

    def _dial_peers(self, view: View) -> None:
        others = {(m.id, m.incarnation): m for m in view.servers if m.id != self.id}
        needed = self._job is not None and (self._job[1].decides or bool(view.backup))
        for key in [key for key in self._peers if key not in others]:
            self._peers.pop(key).close()
        for key, member in others.items():
            if needed and key not in self._peers:
                self._peers[key] = self._dial(member)
                self._peers[key].start()

    def _dial(self, member: Member) -> Dialer:
        standing: list[Channel] = []

        def up(channel: Channel) -> None:
            standing[:] = [channel]
            self._reducer.inbox.put(lambda: self._reducer.peer_linked(member.id, channel))

        def down(_: RallypointError) -> None:
            channel = standing[0]
            self._reducer.inbox.put(lambda: self._reducer.peer_lost(member.id, channel))

        return Dialer(
            transport=self._transport, peer=member, role="server", id=self.id, token=self._token, tracer=self._tracer,
            view=lambda: self._number, up=up, serve=lambda channel: self._receive_acks(member.id, channel), down=down,
        )  # fmt: skip

    def _receive_acks(self, peer: str, channel: Channel) -> None:
        while True:
            header = channel.receive_header()
            if header.kind is Kind.REFUSE:
                raise AccessDenied(expect(channel.receive_bytes(header), Refused).reason)
            if header.kind is not Kind.ACK:
                raise ProtocolError(f"a {header.kind.name} frame from server {peer}")
            self._reducer.inbox.put(
                lambda h=header: self._reducer.acked(peer, channel, h.shard, h.step, h.view)  # type: ignore[misc]
            )

    # ---- the reducer's words ----

    def say(self, message: Message) -> None:
        self._link.send(message)

    def not_finite(self, verdict: clip.Verdict) -> None:
        if self._job is None or self._view is None or self._view.primary[0] != self.id:
            return  # all servers see the same: one of them speaks
        if verdict.scale is None:
            self._link.send(Skipped(verdict.step, verdict.not_finite))
        elif self._job[1].nonfinite == "stop":
            self._link.send(
                GiveUp(
                    f"the gradient of step {verdict.step} is not finite although every loss was; lower the learning "
                    "rate, or set nonfinite to 'skip' or 'continue'"
                )
            )

    def failed(self, error: BaseException) -> None:
        reason = f"server {self.id} failed: {type(error).__name__}: {error}"
        self._link.send(GiveUp(reason))
        self._end(reason)

    # ---- connections ----

    def _admit(self, hello: Hello) -> Welcome:
        if hello.role not in ("worker", "server"):
            raise AccessDenied(f"a {hello.role} has no business with a server")
        return Welcome()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        """Receive one connection's frames until it ends. Runs in that connection's own thread."""
        self._wait_for(hello.view)  # whoever connects may be quicker than our own coordinator link
        self._check_member(hello)
        if hello.role == "worker":
            self._reducer.inbox.put(lambda: self._reducer.linked(channel, hello.id))
        try:
            while not self._over.is_set():
                header = channel.receive_header()
                if hello.role == "server":
                    self._receive_from_server(channel, header, hello.id)
                else:
                    self._receive_from_worker(channel, header, hello.id)
        finally:
            self._reducer.inbox.put(lambda: self._reducer.gone(channel, hello.id))

    def _wait_for(self, number: ViewNumber) -> None:
        """Until the view of that number has come here too (I10): what is said under it is meant for it."""
        with self._changed:
            known = self._changed.wait_for(
                lambda: self._over.is_set() or (self._view is not None and self._view.number >= number),
                None if self._view is None else VIEW_TIMEOUT_S,
            )
        if not known:
            raise ProtocolError(f"view {number} has not come here within {VIEW_TIMEOUT_S:.0f} s: is it of this job?")

    def _check_member(self, hello: Hello) -> None:
        """ProtocolError for whoever has the token but no part in this job's view."""
        view = self._view
        if view is None:
            return
        members = view.servers if hello.role == "server" else view.workers
        if hello.id not in {member.id for member in members}:
            raise ProtocolError(f"{hello.role} {hello.id} is not in view {view.number}")

    def _receive_from_server(self, channel: Channel, header: Header, sender: str) -> None:
        match header.kind:
            case Kind.MEASURES:
                self._receive_measures(channel, header)
            case Kind.REPLICATE:
                self._receive_payload(channel, header, sender)
            case Kind.STATE:
                self._receive_state(channel, header, sender)
            case _:
                raise ProtocolError(f"a {header.kind.name} frame from another server")

    def _receive_measures(self, channel: Channel, header: Header) -> None:
        record, config = self._expect_job()
        try:
            measures = _measures.decode(channel.receive_bytes(header))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"measures that cannot be read: {error}") from None
        parameters = {shard.index for shard in record.layout.shards if shard.group >= 0}
        if header.step >= config.rounds or any(measure.shard not in parameters for measure in measures):
            raise ProtocolError("measures of a step or of a shard that this job does not have")
        self._wait_for(header.view)
        if not self._stale(header):
            self._reducer.inbox.put(lambda: self._reducer.told(header.step, measures, header.view))

    def _receive_state(self, channel: Channel, header: Header, sender: str) -> None:
        record, config = self._expect_job()
        try:
            state = decode_record(bytes(channel.receive_bytes(header)))
        except DamagedSnapshot as error:
            raise ProtocolError(f"a shard's state that cannot be read: {error}") from None
        if state.shard != header.shard or not 0 <= state.shard < len(record.layout.shards):
            raise ProtocolError(f"a state of shard {state.shard} under the name of shard {header.shard}")
        place = record.layout.shards[state.shard]
        if not (fits if place.part is None else fits_rows)(state, place, config):
            raise ProtocolError(f"a state of shard {state.shard} that does not fit this job's layout and optimizer")
        self._wait_for(header.view)
        if not self._stale(header):
            self._reducer.inbox.put(lambda: self._reducer.filled(channel, sender, state, header.view))

    def _receive_from_worker(self, channel: Channel, header: Header, worker: str) -> None:
        trace = self._link.welcome.trace
        self._tracer.on = trace[0] <= header.step < trace[1]
        match header.kind:
            case Kind.PUSH | Kind.INITIAL | Kind.STATE:
                self._receive_payload(channel, header, worker)
            case Kind.WANT:
                self._check_want(header)
                self._wait_for(header.view)
                if not self._stale(header):
                    self._reducer.inbox.put(lambda: self._reducer.want(channel, worker, header.shard, header.wants - 2))
            case Kind.PULL_ROWS:
                self._receive_pull(channel, header)
            case Kind.MEMORY | Kind.RECALL:
                self._receive_codec_state(channel, header, worker)
            case Kind.FOLLOW:
                self._wait_for(header.view)
                self._reducer.inbox.put(lambda: self._reducer.follow(channel))
            case Kind.UNFOLLOW:
                self._reducer.inbox.put(lambda: self._reducer.unfollow(channel))
            case Kind.FETCH:
                self._check_shard(header)
                self._wait_for(header.view)
                self._reducer.inbox.put(lambda: self._reducer.fetch(channel, header.shard, header.step))
            case _:
                raise ProtocolError(f"a {header.kind.name} frame from a worker")

    def _receive_codec_state(self, channel: Channel, header: Header, worker: str) -> None:
        self._check_shard(header)
        _, config = self._expect_job()
        if self._formats is None:
            self._formats = ShardCodecStates(config)
        limits = self._formats.of(self._place(header))
        if header.replica >= config.replicas:
            raise ProtocolError(f"a memory of replica {header.replica}: this job has {config.replicas}")
        if header.kind is Kind.MEMORY and header.length:
            limits.check(header.codec, header.length)
        data = memoryview(channel.receive_bytes(header))
        self._wait_for(header.view)
        if self._stale(header):
            return
        if header.kind is Kind.MEMORY:
            self._reducer.inbox.put(lambda: self._reducer.codec_state_given(header, data, worker))
        else:
            self._reducer.inbox.put(lambda: self._reducer.codec_state_recalled(channel, header, worker))

    def _receive_pull(self, channel: Channel, header: Header) -> None:
        self._check_shard(header)
        part = self._place(header).part
        if part is None or header.length > 4 * part.rows:
            raise ProtocolError(f"a pull of {header.length} bytes from shard {header.shard}, which has not such rows")
        ids = decode_ids(channel.receive_bytes(header), part.rows)
        self._wait_for(header.view)
        if not self._stale(header):
            self._reducer.inbox.put(lambda: self._reducer.pull(channel, header, ids))

    def _receive_payload(self, channel: Channel, header: Header, sender: str) -> None:
        assert self._pool is not None
        self._check_payload(header)
        if header.kind is Kind.STATE:
            buffer = BufferPool(-(-header.length // 4), keeps=False).take()
        else:
            buffer = self._pool.take() if self._place(header).part is None else self._pools.take(header.length)
        try:
            with self._tracer.span("receive", shard=header.shard, replica=header.replica, step=header.step):
                header = self._receive_into(buffer, channel, header)
        except RallypointError:
            buffer.release()
            raise
        self._wait_for(header.view)
        if self._stale(header) or self._over.is_set():
            buffer.release()
            channel.send(Header(Kind.CREDIT, self._number, replica=1), urgent=True)
        elif header.kind is Kind.PUSH:
            self._reducer.inbox.put(lambda: self._reducer.contribute(channel, sender, header, buffer))
        elif header.kind in (Kind.INITIAL, Kind.STATE):
            self._reducer.inbox.put(lambda: self._reducer.initialise(channel, header, buffer))
        else:
            self._reducer.inbox.put(lambda: self._reducer.replicated(channel, sender, header, buffer))

    def _receive_into(self, buffer: Buffer, channel: Channel, header: Header) -> Header:
        """The payload as fp32 words in `buffer`; the header as if it had come like that."""
        if not header.codec:
            channel.receive_into(buffer.bytes[: header.length])
            place = self._place(header)
            if header.kind is Kind.STATE:
                read_state(buffer.bytes[: header.length], place, header.step, self._expect_job()[1])
            elif place.part is not None and header.length:
                check_gradient(buffer.bytes[: header.length], place.part.rows, place.columns)
            return header
        record, config = self._expect_job()
        codecs = getattr(self._decoders, "codecs", None)
        if codecs is None:
            codecs = self._decoders.codecs = ShardCodecs(config)
        place = record.layout.shards[header.shard]
        codec = codecs.of(place)
        if codec is None or header.codec != codec.code or header.length > codec.bytes_for(place.words):
            raise ProtocolError(f"{header.length} bytes in codec {header.codec} for shard {header.shard}: impossible")
        codec.decode(memoryview(channel.receive_bytes(header)), buffer.tensor[: place.words])
        return header._replace(codec=0, length=place.nbytes)

    def _check_payload(self, header: Header) -> None:
        """ProtocolError unless the frame carries exactly one shard of the job, with a sensible weight."""
        self._check_shard(header)
        place = self._place(header)
        if header.kind in (Kind.INITIAL, Kind.STATE):
            self._check_beginning(header, place)
            if header.kind is Kind.STATE:
                return
        least = most = 0 if header.flags & SKIP else place.nbytes
        if place.part is not None:
            empty = header.flags & SKIP or header.kind is Kind.INITIAL  # servers make a table's first values themselves
            least, most = (0, 0) if empty else (gradient_bytes(n, place.columns) for n in (0, place.part.rows))
        misplaced = header.flags & ~NOT_FINITE and header.kind is not Kind.REPLICATE
        if misplaced or (not least <= header.length <= most and not header.codec):
            raise ProtocolError(f"{header.length} bytes for shard {header.shard}, which has {least} to {most}")
        if header.kind in (Kind.PUSH, Kind.REPLICATE) and header.weight <= 0:
            raise ProtocolError(f"a contribution of weight {header.weight}: weights are positive")
        if header.kind is Kind.PUSH and header.wants:
            self._check_want(header)

    def _check_beginning(self, header: Header, place: Shard) -> None:
        """ProtocolError unless what all begin with comes as what it is: of stateful workers' parameters the state."""
        _, config = self._expect_job()
        has_state = config.stateful_workers and place.role == "parameters"
        if (header.kind is Kind.STATE) != has_state or not 0 <= header.step <= config.rounds or header.flags:
            raise ProtocolError(
                f"a {header.kind.name} frame of shard {header.shard} at version {header.step}: this job has none"
            )

    def _check_want(self, header: Header) -> None:
        """ProtocolError unless it wants something that the job has, in a mode in which one asks."""
        self._check_shard(header)
        _, config = self._expect_job()
        if not config.streaming or not 1 <= header.wants < config.replicas + 2:
            raise ProtocolError(f"a wish for {header.wants}: this job has {config.replicas} replicas")

    def _check_shard(self, header: Header) -> None:
        record, _ = self._expect_job()
        if header.shard >= len(record.layout.shards):
            raise ProtocolError(f"shard {header.shard} of a job that has {len(record.layout.shards)}")

    def _place(self, header: Header) -> Shard:
        return self._expect_job()[0].layout.shards[header.shard]

    def _expect_job(self) -> tuple[JobRecord, JobConfig]:
        if self._job is None:
            raise LinkError("the job ended before it began")
        return self._job

    @property
    def _number(self) -> ViewNumber:
        return self._view.number if self._view is not None else ViewNumber()

    def _stale(self, header: Header) -> bool:
        """Is it from before a roll-back? Nobody accepts that any more (I10)."""
        return self._view is not None and header.view < self._view.generation


def run_servers(services: Sequence[ServerService]) -> str | None:
    """Start these servers, wait until their job is over, close them: None, or why it failed."""
    with ExitStack() as started:
        for service in services:
            service.start()
            started.callback(service.close)
        failures = [service.wait() for service in services]
    return next((failure for failure in failures if failure is not None), None)
