"""Receives frames from workers and other servers, checks them, and puts them into the reducer's inbox.

Each connection has its own thread. A frame of a view that this server does not know yet waits for that view. A stale
frame is dropped (I10). A malformed frame ends its connection and changes no state (I9).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from functools import partial

import msgspec

from rallypoint.codec.base import check_gradient, decode_ids, gradient_bytes
from rallypoint.codec.build import ShardCodecs, ShardCodecStates
from rallypoint.config import of_group
from rallypoint.core.audits import Audits
from rallypoint.core.layout import Shard
from rallypoint.core.shard.clip import Measure
from rallypoint.core.sums import Block, is_block, leaf_digest
from rallypoint.errors import DamagedSnapshot, Explained, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import BAD_GRADIENT, NOT_FINITE, SKIP, Header, Kind
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.server.job import ServerJob
from rallypoint.server.member import Views
from rallypoint.server.rows import fits_rows
from rallypoint.server.shard import fits
from rallypoint.store.record import ShardRecord, decode_record, read_state

# ---- Checks what a frame of each kind may carry in this job. A wrong frame raises ProtocolError (I9) ----

_LARGEST_NORM = 1e60  # of a vector of fp32 of any length
_measures = msgspec.msgpack.Decoder(tuple[Measure, ...])
_choice = msgspec.msgpack.Decoder(tuple[int, ...])
_UNREADABLE = (msgspec.DecodeError, RecursionError)


class FrameChecks:
    """The checks of one job. Thread-safe."""

    def __init__(self, job: ServerJob) -> None:
        self._job = job
        self._shards = job.shards
        self._nbytes = [0 if shard.index in job.in_place.parameters else shard.nbytes for shard in job.shards]
        self._rounds = [job.plan.rounds_of(shard.index) for shard in job.shards]
        self._tree = job.config.policy.tree
        self._formats = ShardCodecStates(job.config)

    def place(self, header: Header) -> Shard:
        """The shard that the header names."""
        if header.shard >= len(self._shards):
            raise ProtocolError(f"shard {header.shard} of a job that has {len(self._shards)}")
        return self._shards[header.shard]

    def payload(self, header: Header) -> Shard:
        """Check that the frame carries exactly one shard of the job, with a positive weight. Returns the shard."""
        place = self.place(header)
        if header.kind in (Kind.INITIAL, Kind.STATE):
            self._beginning(header, place)
            if header.kind is Kind.STATE:
                return place
        least = most = 0 if header.flags & SKIP else self._nbytes[header.shard]
        if place.part is not None:
            empty = header.flags & SKIP or header.kind is Kind.INITIAL  # servers compute a table's first values
            least, most = (0, 0) if empty else (gradient_bytes(n, place.columns) for n in (0, place.part.rows))
        misplaced = header.flags & ~(NOT_FINITE | BAD_GRADIENT) and header.kind is not Kind.REPLICATE
        if misplaced or (not least <= header.length <= most and not header.codec):
            raise ProtocolError(f"{header.length} bytes for shard {header.shard}, which has {least} to {most}")
        if header.kind in (Kind.PUSH, Kind.REPLICATE) and header.weight <= 0:
            raise ProtocolError(f"a contribution of weight {header.weight}: weights are positive")
        if header.kind is Kind.PUSH:
            self._push(header)
        return place

    def _beginning(self, header: Header, place: Shard) -> None:
        """The first version comes as a STATE frame where workers hold the parameters, else as an INITIAL frame."""
        whole = self._job.begins_whole and place.role == "parameters"
        if (header.kind is Kind.STATE) != whole or header.step > self._job.config.rounds or header.flags:
            raise ProtocolError(
                f"a {header.kind.name} frame of shard {header.shard} at version {header.step}: this job has none"
            )

    def _push(self, header: Header) -> None:
        if header.step >= (rounds := self._rounds[header.shard]):
            raise ProtocolError(f"a contribution to step {header.step} of shard {header.shard}, which has {rounds}")
        replicas, block = self._job.config.replicas, Block(header.replica, header.replica + header.base + 1)
        if header.replica >= replicas:
            raise ProtocolError(f"a contribution of replica {header.replica}: this job has {replicas}")
        if self._tree:
            if header.base and not is_block(block, replicas):
                raise ProtocolError(f"replicas {block.start} to {block.stop - 1} are no block of {replicas} replicas")
            audits = self._job.plan.audits
            if header.base and audits is not None and audits.audited(header.step):
                raise ProtocolError(f"replicas {block.start} to {block.stop - 1} are added up, and the step is audited")
            bad = header.flags & (NOT_FINITE | BAD_GRADIENT)
            if header.wants >> (min(32, block.size) if bad else 0):
                raise ProtocolError(f"a wish for {header.wants}: nobody asks in this job, and no such replicas are bad")
        elif header.wants:
            self.want(header)

    def want(self, header: Header) -> None:
        """Check that it asks for parameters that the job has, in a mode in which workers ask."""
        self.place(header)
        if not self._job.followers_ask or not 1 <= header.wants < self._job.config.replicas + 2:
            raise ProtocolError(f"a wish for {header.wants}: this job has {self._job.config.replicas} replicas")

    def codec_state(self, header: Header) -> None:
        """Check that it is of a replica of the job, and not longer than its codec's states can be."""
        limits = self._formats.of(self.place(header))
        if header.replica >= self._job.config.replicas:
            raise ProtocolError(f"a codec state of replica {header.replica}: this job has {self._job.config.replicas}")
        if header.kind is Kind.CODEC_STATE and header.length:
            limits.check(header.codec, header.length)

    def pull(self, header: Header) -> int:
        """Check that it asks for rows of a table's part, or (no bytes) for all of another shard. Returns how many rows
        the part has; 0 if the shard is none."""
        part = self.place(header).part
        rows = 0 if part is None else part.rows
        if header.length > 4 * rows:
            raise ProtocolError(f"a pull of {header.length} bytes from shard {header.shard}, which has not such rows")
        return rows

    def words(self, header: Header) -> None:
        """Check that it asks for words of a shard whose parameters are streamed."""
        place = self.place(header)
        streamed = self._job.config.streamed and place.role == "parameters"
        if not streamed or not header.wants or header.replica + header.wants > place.words:
            raise ProtocolError(
                f"a pull of {header.wants} words from word {header.replica} of shard {header.shard}, which has not such"
            )

    def measures(self, header: Header, data: bytearray) -> tuple[Measure, ...]:
        """Decode measures; check that their step and shards are of the job."""
        with Explained(ProtocolError, "measures that cannot be read", of=_UNREADABLE):
            measures = _measures.decode(data)
        if header.step >= self._job.config.rounds or any(m.shard not in self._job.plan.decides for m in measures):
            raise ProtocolError("measures of a step or of a shard that this job does not have")
        if any(norm < 0 or _LARGEST_NORM < norm < math.inf for m in measures for norm in m.norms):
            raise ProtocolError("a norm that no gradient can have")
        return measures

    def choice(self, header: Header, data: bytearray) -> tuple[int, ...]:
        """Decode a choice of contributions; check that it is a quorum of the job's replicas: of buffers one will do."""
        quorum = 1 if self.place(header).role == "buffers" else self._job.config.quorum
        with Explained(ProtocolError, "a choice of contributions that cannot be read", of=_UNREADABLE):
            replicas = _choice.decode(data)
        fits = all(0 <= replica < self._job.config.replicas for replica in replicas)
        once = len(set(replicas)) == len(replicas) == quorum
        if not (fits and once) or header.step >= self._job.config.rounds:
            raise ProtocolError(f"a choice of {len(replicas)} contributions that this job cannot make")
        return replicas

    def record(self, header: Header, data: bytearray) -> ShardRecord:
        """Decode a shard's whole state; check that it fits the job's layout and optimizer."""
        with Explained(ProtocolError, "a shard's state that cannot be read", of=(DamagedSnapshot,)):
            state = decode_record(bytes(data))
        if state.shard != header.shard or not 0 <= state.shard < len(self._shards):
            raise ProtocolError(f"a state of shard {state.shard} under the name of shard {header.shard}")
        place = self._shards[state.shard]
        config = of_group(self._job.config, place.group)
        if not (fits if place.part is None else fits_rows)(state, place, config):
            raise ProtocolError(f"a state of shard {state.shard} that does not fit this job's layout and optimizer")
        return state


_FROM_AGGREGATOR = (Kind.PUSH, Kind.FOLLOW, Kind.UNFOLLOW, Kind.FETCH)

Put = Callable[[inbox.Event | None], None]


class Intake:
    """The connections of one job. `traced` is the range of steps to trace, the end excluded."""

    def __init__(self, job: ServerJob, views: Views, put: Put, tracer: Tracer, traced: tuple[int, int]) -> None:
        self._job, self._views, self._put, self._tracer, self._traced = job, views, put, tracer, traced
        self._checks, self._in_place = FrameChecks(job), job.in_place.parameters
        self._decoders = threading.local()  # each connection's thread has its own codecs
        audits = job.plan.audits
        self._pushed = inbox.Pushed if audits is None else partial(_with_digest, audits)

    def receive_from_server(self, channel: Channel, sender: str) -> None:
        """Receive one frame from another server. ProtocolError if it is wrong, LinkError when the connection ends."""
        header = channel.receive_header()
        match header.kind:
            case Kind.REPLICATE:
                if (received := self._payload(channel, header)) is not None:
                    self._put(inbox.UpdateCame(channel, sender, *received))
            case Kind.MEASURES:
                measures = self._checks.measures(header, channel.receive_bytes(header))
                if self._views.counts(header.view):
                    self._put(inbox.Told(header.step, measures, header.view))
            case Kind.CHOICE:
                replicas = self._checks.choice(header, channel.receive_bytes(header))
                if self._views.counts(header.view):
                    self._put(inbox.ChoiceCame(channel, sender, header, replicas))
            case Kind.PROVE:
                self._checks.place(header)
                sealed = bytes(channel.receive_bytes(header))
                if self._views.counts(header.view):
                    self._put(inbox.QuestionCame(channel, sender, header, sealed))
            case Kind.STATE:
                state = self._checks.record(header, channel.receive_bytes(header))
                if self._views.counts(header.view):
                    self._put(inbox.StateCame(channel, sender, state, header.view))
            case _:
                raise ProtocolError(f"a {header.kind.name} frame from another server")

    def receive_from_aggregator(self, channel: Channel, aggregator: str) -> None:
        """Receive one frame from an aggregator: of those that a worker may send."""
        self.receive_from_worker(channel, aggregator, _FROM_AGGREGATOR)

    def receive_from_worker(self, channel: Channel, worker: str, kinds: Collection[Kind] = ()) -> None:
        """Receive one frame from a worker, or (only `kinds`) from an aggregator.

        ProtocolError if it is wrong, LinkError when the connection ends.
        """
        header = channel.receive_header()
        if kinds and header.kind not in kinds:
            raise ProtocolError(f"a {header.kind.name} frame from an aggregator")
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
                if self._views.counts(header.view):
                    self._put(inbox.WantCame(channel, worker, header.shard, header.wants - 2))
            case Kind.PULL_ROWS:
                rows = self._checks.pull(header)
                ids = decode_ids(channel.receive_bytes(header), rows)
                if self._views.counts(header.view):
                    self._put(inbox.PullCame(channel, header, ids))
            case Kind.PULL_WORDS:
                self._checks.words(header)
                if self._views.counts(header.view):
                    self._put(inbox.PullCame(channel, header, None))
            case Kind.CODEC_STATE | Kind.RECALL:
                self._codec_state(channel, header, worker)
            case Kind.FOLLOW:
                self._views.wait_for(header.view)
                self._put(inbox.Followed(channel, worker, header))
            case Kind.UNFOLLOW:
                self._put(inbox.UnfollowCame(channel, worker))
            case Kind.FETCH:
                self._checks.place(header)
                self._views.wait_for(header.view)
                self._put(inbox.Fetched(channel, worker, header.shard, header.step))
            case _:
                raise ProtocolError(f"a {header.kind.name} frame from a worker")

    def _codec_state(self, channel: Channel, header: Header, worker: str) -> None:
        self._checks.codec_state(header)
        data = memoryview(channel.receive_bytes(header))
        if not self._views.counts(header.view):
            return
        if header.kind is Kind.CODEC_STATE:
            self._put(inbox.StateGiven(worker, header, data))
        else:
            self._put(inbox.StateRecalled(channel, worker, header))

    def _give_back(self, channel: Channel) -> None:
        """Return the credit of a worker's payload that is not used. Servers need no credit."""
        channel.send(Header(Kind.CREDIT, self._views.number, replica=1), urgent=True)

    # ---- payloads ----

    def _payload(self, channel: Channel, header: Header) -> tuple[Header, Buffer] | None:
        """Receive one shard's payload and decode it to fp32. None if it is stale.

        The returned header is that of a raw payload.
        """
        place = self._checks.payload(header)
        plain = place.part is None and header.kind is not Kind.STATE and header.shard not in self._in_place
        buffer = self._job.pool.take() if plain else self._room(header, place)
        try:
            with self._tracer.span("receive", shard=header.shard, replica=header.replica, step=header.step):
                if header.codec:
                    header = self._decode_into(buffer, channel, header, place)
                else:
                    channel.receive_into(buffer.bytes[: header.length])
                    if not plain:
                        self._check_values(buffer, header, place)
            counts = self._views.counts(header.view) and not self._views.over.is_set()
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
        buffer = self._job.pools.take(header.length)
        if not header.length:  # a skipped update, or a first version: no rows
            buffer.bytes[:4] = bytes(4)
        return buffer

    def _check_values(self, buffer: Buffer, header: Header, place: Shard) -> None:
        if header.kind is Kind.STATE:
            read_state(buffer.bytes[: header.length], place, header.step, self._job.config)
        elif place.part is not None and header.length:
            check_gradient(buffer.bytes[: header.length], place.part.rows, place.columns)

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
