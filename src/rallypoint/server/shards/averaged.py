"""One shard as a server holds it where workers are stateful (AllReduce): the sum in progress, and the last means."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.codec.base.scratch import Scratch
from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.server.shards.gradient import GradientSum
from rallypoint.server.shards.wire import WireCopies
from rallypoint.store.record import ShardRecord, encode_record


class AveragedShard:
    """What is published as version t+1 is the mean gradient of step t, clipped; of a step that is skipped, nothing.

    Only the version that all begin with is a state: a record that one worker uploads (or that a snapshot has), which
    goes on to the others as it came. Memory: a shard's bytes for the sum and for each of the last two means; the
    record, three times as much with Adam, goes with the second update.
    """

    measured = True

    def __init__(self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch) -> None:
        self.shard = shard
        self._sum = GradientSum(shard.words)
        self._wire = WireCopies(shard, config, pool, scratch)
        self._begun_at, self._begun_bytes = -1, 0
        self._skipped: set[int] = set()
        self.mean, self.norm, self.abandon = self._sum.mean, self._sum.norm, self._sum.abandon

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """The version that all begin with has come, as a record of so many bytes."""
        self._begun_at, self._begun_bytes = version, nbytes
        self._wire.keep(version, payload, version)

    def take(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """The first contribution."""
        self._sum.take(payload, weight)

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """One more contribution."""
        self._sum.add(payload, weight)

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        """The finished mean becomes the new version."""
        assert not update.replicate, "there is nothing on this server that a backup would have to hold"
        self._skipped = {version for version in self._skipped if version >= update.oldest}
        if update.scale is None:
            self._skipped.add(update.version)
        elif update.scale != 1.0:
            self._sum.values.mul_(update.scale)
        self._wire.keep(update.version, self._sum.leave(), update.oldest)
        return None

    def release(self) -> None:
        """Let go of every buffer."""
        self.abandon()
        self._wire.release()
        self._begun_at = -1
        self._skipped.clear()

    # ---- versions ----

    def keeps(self, version: int) -> bool:
        """Is that version's mean, or state, still here?"""
        return version in self._wire

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version as it is: codec number, buffer (not retained), bytes."""
        code, buffer, nbytes = self._wire.raw(version)
        if version == self._begun_at:
            return code, buffer, self._begun_bytes
        return code, buffer, 0 if version in self._skipped else nbytes

    def encoded(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version as followers get it."""
        as_it_is = version == self._begun_at or version in self._skipped
        return self.raw(version) if as_it_is else self._wire.encoded(version)

    def named(self, header: Header) -> Header:
        """The header of a version's frame, as what it is: a state, a mean, or the word that a step is skipped."""
        if header.step == self._begun_at:
            return header._replace(kind=Kind.STATE)
        return header._replace(flags=SKIP) if header.step in self._skipped else header

    # ---- the whole state ----

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        """Not here: workers have it, and store it."""
        raise AssertionError(f"shard {self.shard.index}: its state is the workers'")

    def load(self, record: ShardRecord) -> None:
        """Begin with what a snapshot says."""
        self.release()
        data = encode_record(record, "none")
        buffer = BufferPool(-(-len(data) // 4), keeps=False).take()
        buffer.bytes[: len(data)] = data
        self.install(buffer, record.version, len(data))
