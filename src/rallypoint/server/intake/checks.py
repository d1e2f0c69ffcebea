"""Checks what a frame of each kind may carry in this job. A wrong frame raises ProtocolError (I9)."""

from __future__ import annotations

import math

import msgspec

from rallypoint.codec.base.rows import gradient_bytes
from rallypoint.codec.state import ShardCodecStates
from rallypoint.config import of_group
from rallypoint.core.layout import Shard
from rallypoint.core.shard.clip import Measure
from rallypoint.core.sums import Block, is_block
from rallypoint.errors import DamagedSnapshot, ProtocolError
from rallypoint.net.frames import BAD_GRADIENT, NOT_FINITE, SKIP, Header, Kind
from rallypoint.server.intake.job import ServerJob
from rallypoint.server.shards.owned import fits
from rallypoint.server.shards.rows import fits_rows
from rallypoint.store.record import ShardRecord, decode_record

_LARGEST_NORM = 1e60  # of a vector of fp32 of any length
_measures = msgspec.msgpack.Decoder(tuple[Measure, ...])
_choice = msgspec.msgpack.Decoder(tuple[int, ...])


class FrameChecks:
    """The checks of one job. Thread-safe."""

    def __init__(self, job: ServerJob) -> None:
        self._job = job
        self._shards = job.shards
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
        least = most = 0 if header.flags & SKIP else place.nbytes
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
        has_state = self._job.beginning.is_state(place)
        if (header.kind is Kind.STATE) != has_state or header.step > self._job.config.rounds or header.flags:
            raise ProtocolError(
                f"a {header.kind.name} frame of shard {header.shard} at version {header.step}: this job has none"
            )

    def _push(self, header: Header) -> None:
        if header.step >= (rounds := self._job.plan.rounds_of(header.shard)):
            raise ProtocolError(f"a contribution to step {header.step} of shard {header.shard}, which has {rounds}")
        replicas, block = self._job.config.replicas, Block(header.replica, header.replica + header.base + 1)
        if header.replica >= replicas:
            raise ProtocolError(f"a contribution of replica {header.replica}: this job has {replicas}")
        if self._job.config.policy.tree:
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
            raise ProtocolError(
                f"a codec state of replica {header.replica}: this job has {self._job.config.replicas}"
            )
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
        try:
            measures = _measures.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"measures that cannot be read: {error}") from None
        if header.step >= self._job.config.rounds or any(m.shard not in self._job.plan.decides for m in measures):
            raise ProtocolError("measures of a step or of a shard that this job does not have")
        if any(m.norm < 0 or _LARGEST_NORM < m.norm < math.inf for m in measures):
            raise ProtocolError("a norm that no gradient can have")
        return measures

    def choice(self, header: Header, data: bytearray) -> tuple[int, ...]:
        """Decode a choice of contributions; check that it is a quorum of the job's replicas."""
        self.place(header)
        try:
            replicas = _choice.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"a choice of contributions that cannot be read: {error}") from None
        fits = all(0 <= replica < self._job.config.replicas for replica in replicas)
        once = len(set(replicas)) == len(replicas) == self._job.config.quorum
        if not (fits and once) or header.step >= self._job.config.rounds:
            raise ProtocolError(f"a choice of {len(replicas)} contributions that this job cannot make")
        return replicas

    def record(self, header: Header, data: bytearray) -> ShardRecord:
        """Decode a shard's whole state; check that it fits the job's layout and optimizer."""
        try:
            state = decode_record(bytes(data))
        except DamagedSnapshot as error:
            raise ProtocolError(f"a shard's state that cannot be read: {error}") from None
        if state.shard != header.shard or not 0 <= state.shard < len(self._shards):
            raise ProtocolError(f"a state of shard {state.shard} under the name of shard {header.shard}")
        place = self._shards[state.shard]
        config = of_group(self._job.config, place.group)
        if not (fits if place.part is None else fits_rows)(state, place, config):
            raise ProtocolError(f"a state of shard {state.shard} that does not fit this job's layout and optimizer")
        return state
