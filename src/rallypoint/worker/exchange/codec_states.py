"""What this worker's codecs remember of its replicas, handed over when a replica changes hands."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from rallypoint.codec.state import CodecState, ShardCodecStates
from rallypoint.config import JobConfig
from rallypoint.core.layout import Layout
from rallypoint.core.worker.handover import Handover, Key, Paths
from rallypoint.errors import ProtocolError
from rallypoint.net.frames import COPY, Header, Kind
from rallypoint.worker.exchange.encoder import Encoder

Send = Callable[[str, Header, memoryview | None], None]


class CodecStates:
    """The shell around `Handover`: it moves memories between the encoder and the links. Guarded by the exchange's lock.

    `send(server, header, payload)` queues a frame and never blocks; whoever sends fills in the view's number.
    """

    def __init__(self, layout: Layout, encoder: Encoder, formats: ShardCodecStates, send: Send) -> None:
        self._layout, self._encoder, self._formats, self._send = layout, encoder, formats, send
        self._handover = Handover(formats.among(layout))
        self._given: dict[Key, CodecState] = {}  # what no server has yet

    @property
    def settled(self) -> bool:
        """Has everything been taken that this worker had to give?"""
        return self._handover.settled

    def drop_all(self) -> None:
        """There was a roll-back. (What the encoder remembers, it forgets before anything is recalled.)"""
        self._handover.drop_all()
        self._given.clear()

    # ---- a replica that is to be computed here ----

    def ready(self, replica: int, paths: Paths) -> bool:
        """Is all here that there is of this replica? If not, it is asked for."""
        self._give(paths)  # first: it may be our own
        for shard, server in self._handover.recall(replica, paths):
            self._send(server, Header(Kind.RECALL, shard=shard, replica=replica), None)
        return self._handover.ready(replica)

    def check(self, header: Header) -> None:
        """ProtocolError unless what comes can be a memory of that shard, or the word that there is none."""
        if not 0 <= header.shard < len(self._layout.shards):
            raise ProtocolError(f"a memory of shard {header.shard}, which is not in this job's layout")
        if header.length:
            self._formats.of(self._layout.shards[header.shard]).check(header.codec, header.length)

    def arrived(self, header: Header, data: bytearray) -> None:
        """A shard's primary has answered."""
        if self._handover.answered(header.shard, header.replica):
            codec_state = CodecState(header.step, header.codec, memoryview(data)) if data else None
            self._encoder.take(header.shard, header.replica, codec_state)

    def where_missing(self, paths: Paths) -> str:
        """What is waited for, as a phrase; "" for nothing."""
        for replica, shards in self._handover.missing.items():
            homes = ", ".join(sorted({paths.homes[shard] for shard in shards}))
            return f"what the worker before left of replica {replica}: {len(shards)} shards from {homes}"
        return ""

    # ---- snapshots ----

    def copy(self, shard: int, replica: int, step: int, server: str) -> None:
        """Send what is remembered after `step`, if there is anything, for a snapshot of the version after it."""
        if (codec_state := self._encoder.copy(shard, replica, step)) is not None:
            self._send(server, _header(shard, replica, codec_state)._replace(base=COPY), codec_state.data)

    # ---- replicas that go elsewhere ----

    def hand_over(self, keeps: AbstractSet[int], paths: Paths) -> None:
        """This worker keeps only these replicas: what is remembered of others goes to the shards' primaries."""
        for key in self._handover.release(keeps):
            if (codec_state := self._encoder.give(*key)) is not None:
                self._given[key] = codec_state
            else:
                self._given.pop(key, None)
        self._give(paths)

    def taken(self, shard: int, replica: int) -> None:
        """A server has what it was given."""
        self._handover.taken(shard, replica)
        self._given.pop((shard, replica), None)

    def _give(self, paths: Paths) -> None:
        for shard, replica, server in self._handover.to_give(paths):
            codec_state = self._given.get((shard, replica))
            self._send(server, _header(shard, replica, codec_state), None if codec_state is None else codec_state.data)


def _header(shard: int, replica: int, codec_state: CodecState | None) -> Header:
    header = Header(Kind.MEMORY, shard=shard, replica=replica)
    if codec_state is None:
        return header
    return header._replace(step=codec_state.step, codec=codec_state.code, length=len(codec_state.data))


def codec_states_of(layout: Layout, config: JobConfig, encoder: Encoder, send: Send) -> CodecStates | None:
    """Those of a job; None if its workers remember nothing."""
    formats = ShardCodecStates(config)
    return CodecStates(layout, encoder, formats, send) if formats.among(layout) else None
