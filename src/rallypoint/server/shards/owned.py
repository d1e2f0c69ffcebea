"""A dense shard's tensors on its primary or backup. Decisions are made elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xxhash

from rallypoint.codec.base import Scratch
from rallypoint.config import JobConfig
from rallypoint.core.layout import Entry, Shard
from rallypoint.core.optimizer import ENTRY, SGD, Sum, of_shard
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import Header
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.optim.flat import ShardOptimizer
from rallypoint.optim.table import state_names
from rallypoint.server.shards.averaged import ShardAverage
from rallypoint.server.shards.gradient import GradientSum, first_that_became, float_ranges
from rallypoint.server.shards.wire import WireCopies
from rallypoint.store.record import AVERAGE, AVERAGED, ShardRecord

# The loss scale in a shard of buffers: two words that follow from what servers decide, not from contributions.


class ScaleWords:
    """Reads and updates the loss scale in a shard's `master` (1-D fp32), where it has one."""

    def __init__(self, config: JobConfig, shard: Shard, entries: Iterable[Entry]) -> None:
        self._rule = config.loss_scale
        places = [e.start - shard.start for e in entries if e.spec.name == ENTRY and e.spec.group < 0]
        self._at = next((at for at in places if 0 <= at < shard.words), None)

    def scale(self, master: torch.Tensor) -> float:
        """The loss scale; 0 if it is in another shard, or there is none."""
        return 0.0 if self._at is None else float(master[self._at])

    def keep(self, master: torch.Tensor) -> tuple[float, ...]:
        """The words as they are before an update."""
        return () if self._at is None else tuple(master[self._at : self._at + 2].tolist())

    def advance(self, master: torch.Tensor, before: tuple[float, ...], *, skipped: bool) -> None:
        """Set the words after an update (`skipped`: that changes nothing else), from what they were before it."""
        if self._at is not None:
            scale, applied = before
            after = self._rule.after(scale, int(applied), skipped=skipped)
            master[self._at : self._at + 2] = torch.tensor(after, dtype=torch.float32, device="cpu")


_WIRE = "wire-"


class OwnedShard:
    """Master weights, optimizer state, the sum in progress, the wire copies of the last two versions, and a pinned one.
    """

    def __init__(
        self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch, entries: Sequence[Entry] = ()
    ) -> None:
        """`entries` are the tensors of the layout, for a shard of buffers."""
        self.shard = shard
        self._pool = pool
        none_here = shard.role == "buffers"
        self._optimizer = None if none_here else ShardOptimizer(config, shard.group, shard.words, shard.columns)
        self.master = (
            torch.zeros(shard.words, dtype=torch.float32, device="cpu") if self._optimizer is None
            else self._optimizer.master
        )  # fmt: skip
        averages = config.average is not None and self._optimizer is not None
        self._average = ShardAverage(config.average, self.master) if config.average and averages else None
        self.measured = self._optimizer is not None
        self._sum = GradientSum(shard.words)
        self._wire = WireCopies(shard, config, pool, scratch)
        # torch's foreach kernel adds Nesterov momentum to the gradient in place; the backup needs it without.
        self._spends_gradient = isinstance(config.applied, SGD) and config.applied.nesterov
        self._compensation = config.compensation
        self._floats = float_ranges(shard, entries)  # of buffers: where they hold floating-point numbers
        self._scale = ScaleWords(config, shard, entries)
        self.mean = _stays if isinstance(config.applied, Sum) else self._sum.mean
        self.norm, self.abandon = self._sum.norm, self._sum.abandon
        self.merge, self.discard = self._sum.merge, self._sum.discard
        self.raw, self.encoded = self._wire.raw, self._wire.encoded

    @property
    def loss_scale(self) -> float:
        """What the losses of the step in progress are multiplied by, if this shard has it; else 0."""
        return self._scale.scale(self.master)

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """Set the first version. Its buffer becomes the wire copy."""
        self.master.copy_(payload.tensor[: self.shard.words])
        self._wire.keep(version, payload, version)
        if self._average is not None:
            self._average.begin()

    def take(self, payload: Buffer, weight: float, base: int | None = None, at: int = 0) -> None:
        """Make a contribution the part of the sum that begins at replica `at`. `base`: see `compensate`."""
        if base is not None:
            self.compensate(payload, base)
        self._sum.take(payload, weight, at)

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """Add a contribution. `base`: see `compensate`."""
        if base is not None:
            self.compensate(payload, base)
        self._sum.add(payload, weight)

    def compensate(self, payload: Buffer, base: int) -> None:
        """Add lambda * g * g * (now - then) to a gradient g that was computed from version `base`.

        Zheng et al., 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation", equation 10. Does
        nothing if `base` is no longer kept.
        """
        if base not in self._wire or self._compensation == 0.0:
            return
        gradient = payload.tensor[: self.shard.words]
        moved = self.master - self._wire.values(base)
        gradient.addcmul_(moved.mul_(gradient), gradient, value=self._compensation)

    def first_not_finite(self) -> int:
        """The first word of the finished sum that is not finite; -1 if all are.

        Of buffers: the first word that is not finite and was before. A mask of infinities is no error.
        """
        if self._optimizer is not None:
            return self._sum.first_not_finite()
        return first_that_became(self._floats, self._sum.values, self.master)

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        """Update the master with the finished gradient, and keep a wire copy of the new version.

        The gradient's buffer becomes the wire copy. With `replicate` the wire copy gets a new buffer, and the scaled
        gradient's buffer is returned, with its bytes, for the backup.
        """
        scale, kept = update.scale, self._scale.keep(self.master)
        wire = self._pool.take() if update.replicate else self._sum.buffer
        if scale is not None and self._optimizer is None:
            self.master.copy_(self._sum.values)
        elif scale is not None and self._optimizer is not None:
            gradient = self._sum.values
            if scale != 1.0:
                gradient.mul_(scale)
            if update.replicate and self._spends_gradient:
                gradient = wire.tensor[: self.shard.words].copy_(gradient)
            self._optimizer.apply(gradient, update.step, update.rate, update.reductions)
            if self._average is not None:
                self._average.update(update.step + 1)
        self._scale.advance(self.master, kept, skipped=scale is None)
        finished = self._sum.leave()
        wire.tensor[: self.shard.words].copy_(self.master)
        self._wire.keep(update.version, wire, update.oldest, update.pinned)
        return (finished, self.shard.nbytes) if update.replicate else None

    def release(self) -> None:
        """Release every buffer."""
        self.abandon()
        self._wire.release()

    def keeps(self, version: int) -> bool:
        """Is there a wire copy of `version`?"""
        return version in self._wire

    def named(self, header: Header) -> Header:
        """The header of a version's frame: unchanged."""
        return header

    # ---- the whole state, for a backup or a snapshot ----

    def digest(self, before: bytes) -> bytes:
        """XXH3-128 of the parameters. (The moments are proved too: without them the next version has other bytes.)

        Nothing follows from an average, so its bytes are proved by themselves.
        """
        found = xxhash.xxh3_128(self.master.numpy().data)
        if self._average is not None:
            found.update(self._average.values.numpy().data)
        return found.digest()

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        """The whole state at `version`; with `wires` also the last versions. The arrays are views, not copies.

        Of buffers, which have no optimizer's state, `version` may be any that is kept.
        """
        arrays = {"master": self.master if wires or self._optimizer is not None else self._wire.values(version)}
        scalars: dict[str, float] = {}
        if self._optimizer is not None:
            moments, scalars = self._optimizer.state()
            arrays |= moments
        if self._average is not None:
            average, count = self._average.state()
            arrays, scalars = arrays | average, scalars | count
        if wires:
            arrays |= {f"{_WIRE}{v}": self._wire.values(v) for v in self._wire}
        plain = {name: array.numpy() for name, array in arrays.items()}
        return ShardRecord(self.shard.index, version, plain, scalars, tuple(clocks))

    def load(self, record: ShardRecord) -> None:
        """Replace the whole state by `record`.

        A record from a snapshot has no wire copies. Then the master becomes the only wire copy.
        """
        self.release()
        arrays = {name: torch.from_numpy(array) for name, array in record.arrays.items()}
        self.master.copy_(arrays.pop("master"))
        wires = {name: arrays.pop(name) for name in list(arrays) if name.startswith(_WIRE)}
        average = {name: arrays.pop(name) for name in [AVERAGE] if name in arrays}
        scalars = {name: number for name, number in record.scalars.items() if name != AVERAGED}
        if self._average is not None:
            self._average.load(average, record.scalars)
        if self._optimizer is not None:
            self._optimizer.load(arrays, scalars)
        for name, values in (wires or {f"{_WIRE}{record.version}": self.master}).items():
            buffer = self._pool.take()
            buffer.tensor[: self.shard.words].copy_(values)
            self._wire.keep(int(name.removeprefix(_WIRE)), buffer, 0)


def _stays(total_weight: float) -> None:
    """Of a sum no mean is made: who wants one divides."""


def fits(record: ShardRecord, shard: Shard, config: JobConfig) -> bool:
    """Is `record` a whole state of this shard, as `OwnedShard.load` needs it?"""
    wires = {name for name in record.arrays if name.startswith(_WIRE) and name.removeprefix(_WIRE).isdecimal()}
    moments = record.arrays.keys() - wires - {"master"}
    nothing: tuple[set[str], set[str]] = (set(), set())
    known = [nothing] if shard.role == "buffers" else state_names(of_shard(config.applied, shard.columns))
    numbers = set(record.scalars)
    if config.average is not None and shard.role == "parameters":
        if AVERAGE not in moments or AVERAGED not in numbers or not _is_count(record.scalars[AVERAGED]):
            return False
        moments, numbers = moments - {AVERAGE}, numbers - {AVERAGED}
    right = (moments, numbers) in known and len(record.clocks) == config.clocks(shard.role)
    same = all(len(array) == shard.words and array.dtype == np.float32 for array in record.arrays.values())
    return "master" in record.arrays and f"{_WIRE}{record.version}" in wires and right and same


def _is_count(number: float) -> bool:
    return number >= 0 and number.is_integer()


# A dense shard whose versions workers do not follow: they hear that one exists, and pull the words that they need.


class StreamedShard(OwnedShard):
    """Like OwnedShard; what it sends to followers is empty."""

    def __init__(self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch, nothing: Buffer) -> None:
        """`nothing` is an empty buffer."""
        super().__init__(shard, config, pool, scratch)
        self._nothing = nothing
        self.raw = self.encoded = self._empty

    def _empty(self, version: int) -> tuple[int, Buffer, int]:
        """An empty payload: followers only hear that the version exists."""
        return 0, self._nothing, 0

    def words(self, version: int, first: int, count: int) -> tuple[Buffer, memoryview]:
        """Words [first, first + count) of a kept version, and the buffer to release when they are not needed any more.

        It is the version's own, or, for less than half of it, one with a copy: a slow worker's backlog counts the words
        alone, so they may not keep a whole version.
        """
        _, buffer, _ = self._wire.raw(version)
        words = buffer.bytes[4 * first : 4 * (first + count)]
        if 2 * len(words) >= len(buffer.bytes):
            return buffer.retain(), words
        copy = BufferPool(count, keeps=False).take()
        copy.bytes[:] = words
        return copy, copy.bytes
