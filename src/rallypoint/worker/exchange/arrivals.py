"""Handles what arrives: versions, states, rows, codec states, lost links. Called on the links' receiving threads."""

from __future__ import annotations

from rallypoint.config import JobConfig
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.view import Member
from rallypoint.core.worker.slots import Arriving, ToWait
from rallypoint.errors import JobAborted, ProtocolError, RallypointError
from rallypoint.net.frames import Header
from rallypoint.worker.exchange.effects import CodecStates
from rallypoint.worker.exchange.encoder import Encoder
from rallypoint.worker.exchange.locked import LockedShell
from rallypoint.worker.exchange.pushes import Pushes
from rallypoint.worker.exchange.replicated import ServerState
from rallypoint.worker.exchange.rows import RowPulls
from rallypoint.worker.streamed.pulls import WordPulls

_CODEC_HEAD = 4096  # bytes beside the values that a codec may need for a small shard


class Arrivals:
    """The `Receiver` of all links of one exchange. It has no mutable field of its own: its parts guard theirs."""

    def __init__(
        self, layout: Layout, config: JobConfig, locked: LockedShell, pushes: Pushes, encoder: Encoder,
        codec_states: CodecStates | None, optimizer: ServerState, pulls: tuple[RowPulls, WordPulls],
    ) -> None:  # fmt: skip
        self._layout, self._replicas, self._rounds = layout, config.replicas, config.rounds
        self._most_updates = config.rounds * max(1, config.clocks("parameters"))  # of one shard
        self._locked, self._pushes, self._encoder = locked, pushes, encoder
        self._codec_states, self._optimizer = codec_states, optimizer
        self._rows, self._words = pulls
        self._streamed = config.streamed

    # ---- versions ----

    def arriving(self, header: Header, server: str) -> memoryview | None:
        shard, nbytes = self._shard(header), header.length
        skips = self._optimizer.skips(header) or (self._streamed and shard.role == "parameters")  # no bytes
        if header.codec == 0 and nbytes != (0 if skips else shard.slot_bytes):
            raise ProtocolError(f"a version of {nbytes} bytes for shard {shard.index}, which has {shard.slot_bytes}")
        if nbytes > 2 * shard.slot_bytes + _CODEC_HEAD:
            raise ProtocolError(f"an encoded version of {nbytes} bytes for shard {shard.index}: no codec needs so many")
        self._check_version(header)
        replica = 0 if header.wanted is None else header.wanted
        event = Arriving(
            shard.index, header.step, header.view, replica, header.base, whole=self._optimizer.starts(shard)
        )
        lands = self._locked.arriving(event, server, lambda: self._optimizer.lands(shard.index, skips=skips))
        if not lands:
            return None
        return memoryview(bytearray(nbytes)) if skips else self._pushes.slot(shard.index)

    def decode(self, shard: int, payload: memoryview) -> None:
        self._encoder.decode(payload, self._pushes.words(shard))

    def landed(self, shard: int) -> None:
        self._locked.landed(shard)

    def state(self, header: Header, data: bytearray, server: str) -> None:
        shard = self._shard(header)
        self._check_version(header)
        record = self._optimizer.read(header, data, shard)
        event = Arriving(shard.index, header.step, header.view, begins=True)
        if self._locked.arriving(event, server, lambda: self._optimizer.lands(shard.index, record=record)):
            self._locked.landed(shard.index)

    def to_wait(self, replica: int, clock: int) -> None:
        if replica >= self._replicas:
            raise ProtocolError(f"the word to wait for replica {replica}: this job has {self._replicas}")
        self._locked.handle(ToWait(replica, clock))

    def rows(self, header: Header, data: bytearray) -> None:
        self._rows.arrived(header, data)

    def words_arriving(self, header: Header) -> memoryview | None:
        self._shard(header)
        return self._words.arriving(header)

    def words_arrived(self, header: Header) -> None:
        self._words.arrived(header)

    # ---- codec states ----

    def check_codec_state(self, header: Header) -> None:
        self._codec_states_of(header).check(self._shard(header), header)

    def codec_state(self, header: Header, data: bytearray) -> None:
        states = self._codec_states_of(header)
        self._locked.set(lambda: states.arrived(header, data))

    def codec_state_taken(self, header: Header) -> None:
        states = self._codec_states_of(header)
        self._locked.set(lambda: states.taken(header.shard, header.replica))

    def _codec_states_of(self, header: Header) -> CodecStates:
        if self._codec_states is None:
            raise ProtocolError(f"a {header.kind.name} frame, though this job's codecs have no state")
        return self._codec_states

    # ---- links ----

    def link_up(self, server: Member) -> None:
        self._locked.apply(lambda: self._locked.shell.link_up(server.id))

    def link_lost(self, server: Member, error: RallypointError) -> None:
        # The server may refuse us only for now: this worker may have been given up and be admitted again
        if isinstance(error, ProtocolError):
            self._locked.fail(JobAborted(f"the link to server {server.id} is gone: {error}"))
        self._locked.apply(lambda: self._locked.shell.link_lost(server.id))

    def link_failed(self, server: Member, fault: Exception) -> None:
        self._locked.fail(JobAborted(f"the link to server {server.id} has failed: {fault!r}"))

    def _check_version(self, header: Header) -> None:
        """ProtocolError for a version that the job cannot have: the worker would wait for the other shards' for ever.
        """
        replica = header.wanted or 0
        if header.step > self._most_updates or header.base > self._rounds or replica >= self._replicas:
            raise ProtocolError(
                f"version {header.step} of shard {header.shard}, for replica {replica}'s step {header.base}: "
                f"this job has {self._replicas} replicas and {self._rounds} rounds"
            )

    def _shard(self, header: Header) -> Shard:
        if not 0 <= header.shard < len(self._layout.shards):
            raise ProtocolError(f"a {header.kind.name} frame for shard {header.shard}: not in this job's layout")
        return self._layout.shards[header.shard]
