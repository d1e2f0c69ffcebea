"""A shard on a server where workers hold the state (AllReduce): the sum in progress, and the last two means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rallypoint.codec.base import Scratch
from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.optimizer import EMA, Average, takes
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.server.shards.gradient import GradientSum
from rallypoint.server.shards.wire import WireCopies
from rallypoint.store.record import AVERAGE, AVERAGED, ShardRecord, encode_record

# ---- The average of one dense shard's parameters over its versions (rp.EMA, rp.SWA) ----


class ShardAverage:
    """Owns one average (fp32, shape (words,)), which begins as the first version that it takes. Owner thread only.

    Memory: a shard's bytes.
    """

    def __init__(self, spec: Average, master: torch.Tensor) -> None:
        self._spec, self._master = spec, master
        self.values = torch.zeros_like(master)
        self._averaged = 0

    def begin(self) -> None:
        """The parameters have their first values: nothing is averaged yet."""
        self.values.copy_(self._master)
        self._averaged = 0

    def update(self, version: int) -> None:
        """Take the parameters that update number `version` (from 1) has made."""
        if not takes(self._spec, version):
            return
        if not self._averaged:
            self.values.copy_(self._master)
        elif isinstance(self._spec, EMA):
            self.values.lerp_(self._master, 1.0 - self._spec.decay)
        else:
            self.values.add_((self._master - self.values).div_(self._averaged + 1))
        self._averaged += 1

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The average, not copied, and the number of versions in it, by their names in a record."""
        return {AVERAGE: self.values}, {AVERAGED: float(self._averaged)}

    def load(self, arrays: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
        """Go on from a record's state. A snapshot of a job that had no average has none: then it begins here."""
        if AVERAGE not in arrays:
            self.begin()
            return
        self.values.copy_(arrays[AVERAGE])
        self._averaged = int(scalars.get(AVERAGED, 0.0))


class AveragedShard:
    """Version t+1 is the mean gradient of step t, clipped. For a skipped step, version t+1 is empty.

    Only the first version is a state: a record that one worker uploads (or a snapshot contains), sent unchanged to the
    other workers. Memory: a shard's bytes for the sum and for each of the last two means. The record, three times as
    large with Adam, is released with the second update.
    """

    measured = True
    loss_scale = 0.0

    def __init__(self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch) -> None:
        self.shard = shard
        self._sum = GradientSum(shard.words)
        self._wire = WireCopies(shard, config, pool, scratch)
        self._begun_at, self._begun_bytes = -1, 0
        self._skipped: set[int] = set()
        self.mean, self.norm, self.abandon = self._sum.mean, self._sum.norm, self._sum.abandon
        self.merge, self.discard = self._sum.merge, self._sum.discard
        self.first_not_finite = self._sum.first_not_finite

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """Set the first version: a record of `nbytes` bytes."""
        self._begun_at, self._begun_bytes = version, nbytes
        self._wire.keep(version, payload, version)

    def take(self, payload: Buffer, weight: float, base: int | None = None, at: int = 0) -> None:
        """Make a contribution the part of the sum that begins at replica `at`."""
        self._sum.take(payload, weight, at)

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """Add one more contribution."""
        self._sum.add(payload, weight)

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        """Make the finished mean the new version. Always returns None."""
        assert not update.replicate, "there is nothing on this server that a backup would have to hold"
        self._skipped = {version for version in self._skipped if version >= update.oldest}
        if update.scale is None:
            self._skipped.add(update.version)
        elif update.scale != 1.0:
            self._sum.values.mul_(update.scale)
        self._wire.keep(update.version, self._sum.leave(), update.oldest)
        return None

    def release(self) -> None:
        """Release every buffer."""
        self.abandon()
        self._wire.release()
        self._begun_at = -1
        self._skipped.clear()

    # ---- versions ----

    def keeps(self, version: int) -> bool:
        """Is that version's mean, or state, still here?"""
        return version in self._wire

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version, raw: codec number 0, buffer (not retained), number of bytes."""
        code, buffer, nbytes = self._wire.raw(version)
        if version == self._begun_at:
            return code, buffer, self._begun_bytes
        return code, buffer, 0 if version in self._skipped else nbytes

    def encoded(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version as it is sent to followers: see `raw`."""
        as_it_is = version == self._begun_at or version in self._skipped
        return self.raw(version) if as_it_is else self._wire.encoded(version)

    def named(self, header: Header) -> Header:
        """The header of a version's frame, marked as a state, a mean, or a skipped step."""
        if header.step == self._begun_at:
            return header._replace(kind=Kind.STATE)
        return header._replace(flags=SKIP) if header.step in self._skipped else header

    # ---- the whole state ----

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        """AssertionError: workers hold the state, and store it."""
        raise AssertionError(f"shard {self.shard.index}: its state is the workers'")

    def digest(self, before: bytes) -> bytes:
        """AssertionError: there are no backups."""
        raise AssertionError(f"shard {self.shard.index}: it has no backup")

    def load(self, record: ShardRecord) -> None:
        """Begin with the record of a snapshot."""
        self.release()
        data = encode_record(record, "none")
        buffer = BufferPool(-(-len(data) // 4), keeps=False).take()
        buffer.bytes[: len(data)] = data
        self.install(buffer, record.version, len(data))
