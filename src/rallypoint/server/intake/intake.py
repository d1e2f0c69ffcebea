"""Receives frames from workers and other servers, checks them, and puts them into the reducer's inbox.

Each connection has its own thread. A frame of a view that this server does not know yet waits for that view. A stale
frame is dropped (I10). A malformed frame ends its connection and changes no state (I9).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from rallypoint.codec.base.rows import check_gradient, decode_ids
from rallypoint.codec.shards import ShardCodecs
from rallypoint.core.audits import Audits
from rallypoint.core.layout import Shard
from rallypoint.core.sums import leaf_digest
from rallypoint.errors import ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.observe.trace import Tracer
from rallypoint.server.intake.checks import FrameChecks
from rallypoint.server.intake.job import ServerJob
from rallypoint.server.intake.views import Views
from rallypoint.server.reducer import inbox
from rallypoint.store.state import read_state

_FROM_AGGREGATOR = (Kind.PUSH, Kind.FOLLOW, Kind.UNFOLLOW, Kind.FETCH)

Put = Callable[[inbox.Event | None], None]


class Intake:
    """The connections of one job. `traced` is the range of steps to trace, the end excluded."""

    def __init__(self, job: ServerJob, views: Views, put: Put, tracer: Tracer, traced: tuple[int, int]) -> None:
        self._job, self._views, self._put, self._tracer, self._traced = job, views, put, tracer, traced
        self._checks = FrameChecks(job)
        self._decoders = threading.local()  # each connection's thread has its own codecs
        audits = job.plan.audits
        self._pushed = inbox.Pushed if audits is None else partial(_with_digest, audits)

    def receive_from_server(self, channel: Channel, sender: str) -> None:
        """Receive one frame from another server. ProtocolError if it is wrong, LinkError when the connection ends."""
        header = channel.receive_header()
        match header.kind:
            case Kind.REPLICATE:
                if (received := self._payload(channel, header)) is not None:
                    self._put(inbox.Replicated(channel, sender, *received))
            case Kind.MEASURES:
                measures = self._checks.measures(header, channel.receive_bytes(header))
                if self._counts(header):
                    self._put(inbox.Told(header.step, measures, header.view))
            case Kind.CHOICE:
                replicas = self._checks.choice(header, channel.receive_bytes(header))
                if self._counts(header):
                    self._put(inbox.Chosen(channel, sender, header, replicas))
            case Kind.PROVE:
                self._checks.place(header)
                sealed = bytes(channel.receive_bytes(header))
                if self._counts(header):
                    self._put(inbox.Asked(channel, sender, header, sealed))
            case Kind.STATE:
                state = self._checks.record(header, channel.receive_bytes(header))
                if self._counts(header):
                    self._put(inbox.Filled(channel, sender, state, header.view))
            case _:
                raise ProtocolError(f"a {header.kind.name} frame from another server")

    def receive_from_aggregator(self, channel: Channel, aggregator: str) -> None:
        """Receive one frame from an aggregator: of those that a worker may send."""
        header = channel.receive_header()
        if header.kind not in _FROM_AGGREGATOR:
            raise ProtocolError(f"a {header.kind.name} frame from an aggregator")
        self._take_from_worker(channel, header, aggregator)

    def receive_from_worker(self, channel: Channel, worker: str) -> None:
        """Receive one frame from a worker. ProtocolError if it is wrong, LinkError when the connection ends."""
        self._take_from_worker(channel, channel.receive_header(), worker)

    def _take_from_worker(self, channel: Channel, header: Header, worker: str) -> None:
        match header.kind:
            case Kind.PUSH:
                self._tracer.on = self._traced[0] <= header.step < self._traced[1]
                if (received := self._payload(channel, header)) is not None:
                    self._put(self._pushed(channel, worker, *received))
                else:
                    self._give_back(channel)
            case Kind.INITIAL | Kind.STATE:
                if (received := self._payload(channel, header)) is not None:
                    self._put(inbox.Initial(channel, *received))
                else:
                    self._give_back(channel)
            case Kind.WANT:
                self._checks.want(header)
                if self._counts(header):
                    self._put(inbox.Wanted(channel, worker, header.shard, header.wants - 2))
            case Kind.PULL_ROWS:
                rows = self._checks.pull(header)
                ids = decode_ids(channel.receive_bytes(header), rows)
                if self._counts(header):
                    self._put(inbox.Pulled(channel, header, ids))
            case Kind.PULL_WORDS:
                self._checks.words(header)
                if self._counts(header):
                    self._put(inbox.Pulled(channel, header, None))
            case Kind.CODEC_STATE | Kind.RECALL:
                self._codec_state(channel, header, worker)
            case Kind.FOLLOW:
                self._views.wait_for(header.view)
                self._put(inbox.Followed(channel, worker, header))
            case Kind.UNFOLLOW:
                self._put(inbox.Unfollowed(channel, worker))
            case Kind.FETCH:
                self._checks.place(header)
                self._views.wait_for(header.view)
                self._put(inbox.Fetched(channel, worker, header.shard, header.step))
            case _:
                raise ProtocolError(f"a {header.kind.name} frame from a worker")

    def _codec_state(self, channel: Channel, header: Header, worker: str) -> None:
        self._checks.codec_state(header)
        data = memoryview(channel.receive_bytes(header))
        if not self._counts(header):
            return
        if header.kind is Kind.CODEC_STATE:
            self._put(inbox.StateGiven(worker, header, data))
        else:
            self._put(inbox.StateRecalled(channel, worker, header))

    def _counts(self, header: Header) -> bool:
        """Wait until this server knows the frame's view. Returns False if the frame is stale."""
        self._views.wait_for(header.view)
        return not self._views.is_stale(header.view)

    def _give_back(self, channel: Channel) -> None:
        """Return the credit of a worker's payload that is not used. Servers need no credit."""
        channel.send(Header(Kind.CREDIT, self._views.number, replica=1), urgent=True)

    # ---- payloads ----

    def _payload(self, channel: Channel, header: Header) -> tuple[Header, Buffer] | None:
        """Receive one shard's payload and decode it to fp32. None if it is stale.

        The returned header is that of a raw payload.
        """
        place = self._checks.payload(header)
        buffer = self._room(header, place)
        try:
            with self._tracer.span("receive", shard=header.shard, replica=header.replica, step=header.step):
                header = self._receive_into(buffer, channel, header, place)
            counts = self._counts(header) and not self._views.over.is_set()
        except RallypointError:
            buffer.release()
            raise
        if counts:
            return header, buffer
        buffer.release()
        return None

    def _room(self, header: Header, place: Shard) -> Buffer:
        if header.kind is Kind.STATE:
            return BufferPool(-(-header.length // 4), keeps=False).take()
        if place.part is None:
            return self._job.pool.take()
        buffer = self._job.pools.take(header.length)
        if not header.length:  # a skipped update, or a first version: no rows
            buffer.bytes[:4] = bytes(4)
        return buffer

    def _receive_into(self, buffer: Buffer, channel: Channel, header: Header, place: Shard) -> Header:
        if header.codec:
            return self._decode_into(buffer, channel, header, place)
        channel.receive_into(buffer.bytes[: header.length])
        if header.kind is Kind.STATE:
            read_state(buffer.bytes[: header.length], place, header.step, self._job.config)
        elif place.part is not None and header.length:
            check_gradient(buffer.bytes[: header.length], place.part.rows, place.columns)
        return header

    def _decode_into(self, buffer: Buffer, channel: Channel, header: Header, place: Shard) -> Header:
        codecs = getattr(self._decoders, "codecs", None)
        if codecs is None:
            codecs = self._decoders.codecs = ShardCodecs(self._job.config)
        codec = codecs.of(place)
        if codec is None or header.codec != codec.code or header.length > codec.bytes_for(place.words):
            raise ProtocolError(f"{header.length} bytes in codec {header.codec} for shard {header.shard}: impossible")
        codec.decode(memoryview(channel.receive_bytes(header)), buffer.tensor[: place.words])
        return header._replace(codec=0, length=place.nbytes)


def _with_digest(audits: Audits, channel: Channel, worker: str, header: Header, buffer: Buffer) -> inbox.Pushed:
    """The event of a contribution in a job with audits: with its digest, if it is audited."""
    digest = leaf_digest(buffer.bytes[: header.length]) if audits.audited(header.step) else b""
    return inbox.Pushed(channel, worker, header, buffer, digest)
