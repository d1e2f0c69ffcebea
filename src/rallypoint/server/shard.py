"""A dense shard's tensors on a server. Decisions are made elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from rallypoint.codec.base import NonFinitePayload, Scratch, all_finite
from rallypoint.codec.build import down_codec
from rallypoint.config import JobConfig
from rallypoint.core.layout import SHARD_BYTES, WORD_BYTES, Entry, Shard
from rallypoint.core.optimizer import EMA, ENTRY, SGD, Average, LossScaling, Sum, of_shard, takes
from rallypoint.core.order import derive_seed
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.optim import InPlace, Pieces, ShardOptimizer, state_names
from rallypoint.store.record import AVERAGE, AVERAGED, ShardRecord, encode_record

# ---- The sum in progress of one dense shard, and whether values are finite ----


class GradientSum:
    """Parts of the sum, by the first of their replicas. The finished sum is the part that begins at replica 0.

    A contribution's buffer becomes a part. Where there is no tree, there is one part, to which the others are added.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._parts: dict[int, Buffer] = {}

    @property
    def buffer(self) -> Buffer:
        """The finished sum's buffer."""
        return self._parts[0]

    @property
    def values(self) -> torch.Tensor:
        """The sum as a view of its buffer: fp32, shape (words,)."""
        return self._parts[0].tensor[: self._words]

    def take(self, payload: Buffer, weight: float, at: int = 0) -> None:
        """Make a contribution, times its weight, the part that begins at replica `at`. The buffer belongs to the sum.
        """
        assert at not in self._parts
        self._parts[at] = payload
        if weight != 1.0:
            self._values(at).mul_(weight)

    def merge(self, left: int, right: int) -> None:
        """Add the part that begins at `right` to the one that begins at `left`, with one rounding of each value."""
        self._values(left).add_(self._values(right))
        self.discard(right)

    def discard(self, at: int) -> None:
        self._parts.pop(at).release()

    def add(self, payload: Buffer, weight: float) -> None:
        """Add a contribution, times its weight. Multiplying first gives the same rounding for any cut into shards."""
        values = payload.tensor[: self._words]
        if weight != 1.0:
            values.mul_(weight)
        self.values.add_(values)
        payload.release()

    def mean(self, total_weight: float) -> None:
        if total_weight != 1.0:
            self.values.mul_(1.0 / total_weight)

    def norms(self) -> tuple[float, ...]:
        """The 2-norms of the sum's pieces of 1 MiB (after `mean`: of the mean's)."""
        return norms_of(self.values)

    def first_not_finite(self) -> int:
        return first_not_finite(self.values)

    def leave(self) -> Buffer:
        """Return the finished gradient's buffer. The caller must release it."""
        return self._parts.pop(0)

    def abandon(self) -> None:
        for at in list(self._parts):
            self.discard(at)

    def _values(self, at: int) -> torch.Tensor:
        return self._parts[at].tensor[: self._words]


def norms_of(values: torch.Tensor) -> tuple[float, ...]:
    """The 2-norms of each MiB of a shard (1-D fp32)."""
    return tuple(map(norm_of, torch.split(values, SHARD_BYTES // WORD_BYTES)))


def norm_of(values: torch.Tensor) -> float:
    """The 2-norm, in fp32; in fp64 where squares of large values overflow. Not finite only if a value is not."""
    norm = float(torch.linalg.vector_norm(values))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(values, dtype=torch.float64))


def first_not_finite(values: torch.Tensor) -> int:
    """The position of the first value that is not finite; -1 if all are. Usually one pass, a sum: see `all_finite`."""
    return -1 if all_finite(values) else int(torch.isfinite(values).logical_not_().nonzero()[0])


class FloatRange(NamedTuple):
    """Words [start, stop) of a shard of buffers hold floating-point numbers of this type."""

    start: int
    stop: int
    dtype: torch.dtype


_FLOATS = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "complex128": torch.float64, "complex64": torch.float32, "complex32": torch.float16,  # two of them each
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e4m3fnuz": torch.float8_e4m3fnuz, "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz, "float8_e8m0fnu": torch.float8_e8m0fnu,
}  # fmt: skip


def float_ranges(shard: Shard, entries: Iterable[Entry]) -> list[FloatRange]:
    """Where a shard of buffers holds floating-point numbers: whole numbers only, if the shard begins inside one."""
    found = []
    for entry in entries:
        dtype = _FLOATS.get(entry.spec.dtype)
        start, stop = max(entry.start, shard.start), min(entry.stop, shard.stop)
        if dtype is None or start >= stop:
            continue
        words = -(-dtype.itemsize // 4)
        start += (start - entry.start) % words
        parts = 2 if entry.spec.dtype.startswith("complex") else 1
        used = entry.start + -(-entry.spec.numel * parts * dtype.itemsize // 4)
        stop = min(stop, used) - (min(stop, used) - start) % words
        if start < stop:
            found.append(FloatRange(start - shard.start, stop - shard.start, dtype))
    return found


def first_that_became(ranges: Iterable[FloatRange], new: torch.Tensor, old: torch.Tensor) -> int:
    """The first word of `new` that is not finite where `old` was; -1 if there is none. Both fp32, of one shard."""
    for start, stop, dtype in ranges:
        values, before = (vector[start:stop].view(dtype) for vector in (new, old))
        if dtype.itemsize == 1:  # torch has no sums of these
            values, before = values.float(), before.float()
        if all_finite(values):
            continue
        became = torch.isfinite(before) & ~torch.isfinite(values)
        if bool(became.any()):
            return start + int(became.nonzero()[0]) * dtype.itemsize // 4
    return -1


# ---- The wire copies of one dense shard: its last versions, as they are sent ----


class WireCopies:
    """Buffers by version. Each version is encoded once for all followers."""

    def __init__(self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch) -> None:
        self._shard, self._seed, self._pool, self._nbytes = shard, config.seed, pool, shard.nbytes
        self._codec = down_codec(config, shard, scratch)
        self.encoded = self.raw if self._codec is None else self._encode
        self._raw: dict[int, Buffer] = {}
        self._encoded: dict[int, tuple[int, Buffer, int]] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._raw

    def __iter__(self) -> Iterator[int]:
        return iter(self._raw)

    def values(self, version: int) -> torch.Tensor:
        """A kept version: fp32, shape (words,)."""
        return self._raw[version].tensor[: self._shard.words]

    def keep(self, version: int, buffer: Buffer, oldest: int, pinned: int = -1) -> None:
        """Keep `buffer` as a version, and release the versions before `oldest`, but not `pinned`."""
        self._raw[version] = buffer
        for old in [v for v in self._raw if v < oldest and v != pinned]:
            self._raw.pop(old).release()
            if old in self._encoded:
                self._encoded.pop(old)[1].release()

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version, raw: codec number 0, buffer (not retained), number of bytes."""
        return 0, self._raw[version], self._nbytes

    def _encode(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version, encoded for followers; raw if the codec refuses it because of a NaN."""
        assert self._codec is not None
        if version not in self._encoded:
            buffer = self._pool.take()
            try:  # the seed does not depend on the server, so a backup writes the same bytes
                seed = derive_seed(self._seed, "down", version, self._shard.index)
                used = self._codec.encode(self.values(version), buffer.bytes, seed=seed)
            except NonFinitePayload:
                buffer.release()
                return self.raw(version)
            self._encoded[version] = (self._codec.code, buffer, used)
        return self._encoded[version]

    def release(self) -> None:
        for buffer in (*self._raw.values(), *(encoded for _, encoded, _ in self._encoded.values())):
            buffer.release()
        self._raw.clear()
        self._encoded.clear()


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


# ---- A shard on a server where workers hold the state (AllReduce): the sum in progress, and the last two means ----


class AveragedShard:
    """Version t+1 is the mean gradient of step t, clipped. For a skipped step, version t+1 is empty.

    Only the first version is a state: a record that one worker uploads (or a snapshot contains), sent unchanged to the
    other workers. Memory: a shard's bytes for the sum and for each of the last two means. The record, three times as
    large with Adam, is released with the second update.
    """

    measured = True
    loss_scale = 0.0

    def __init__(
        self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch, sum: PiecesSum | None = None
    ) -> None:
        self.shard = shard
        self._sum: GradientSum | PiecesSum = sum or GradientSum(shard.words)
        self._wire = WireCopies(shard, config, pool, scratch)
        self._begun_at, self._begun_bytes = -1, 0
        self._skipped: set[int] = set()
        self.mean, self.norms, self.abandon = self._sum.mean, self._sum.norms, self._sum.abandon
        self.merge, self.discard = self._sum.merge, self._sum.discard
        self.first_not_finite = self._sum.first_not_finite

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """Set the first version: a record of `nbytes` bytes."""
        self._begun_at, self._begun_bytes = version, nbytes
        self._wire.keep(version, payload, version)

    def take(self, payload: Buffer, weight: float, base: int | None = None, at: int = 0) -> None:
        self._sum.take(payload, weight, at)

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        self._sum.add(payload, weight)

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        """Make the finished mean the new version. Always returns None."""
        assert not update.replicate, "there is nothing on this server that a backup would have to hold"
        self._skipped = {version for version in self._skipped if version >= update.oldest}
        if update.scale is None:
            self._skipped.add(update.version)
        self._wire.keep(update.version, self._finished(1.0 if update.scale is None else update.scale), update.oldest)
        return None

    def _finished(self, scale: float) -> Buffer:
        assert isinstance(self._sum, GradientSum)
        if scale != 1.0:
            self._sum.values.mul_(scale)
        return self._sum.leave()

    def release(self) -> None:
        self.abandon()
        self._wire.release()
        self._begun_at = -1
        self._skipped.clear()

    # ---- versions ----

    def keeps(self, version: int) -> bool:
        return version in self._wire

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version: codec number, buffer (not retained), number of bytes. A mean goes as any other, also the last
        one: when all workers have stepped with it, a script may still say that it is the last."""
        if version != self._begun_at and version not in self._skipped:
            return self._wire.encoded(version)
        code, buffer, _ = self._wire.raw(version)
        return code, buffer, self._begun_bytes if version == self._begun_at else 0

    encoded = raw

    def named(self, header: Header) -> Header:
        """The header of a version's frame, marked as a state, a mean, or a skipped step."""
        if header.step == self._begun_at:
            return header._replace(kind=Kind.STATE)
        return header._replace(flags=SKIP) if header.step in self._skipped else header

    # ---- the whole state ----

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        raise AssertionError(f"shard {self.shard.index}: its state is the workers'")

    def digest(self, before: bytes) -> bytes:
        raise AssertionError(f"shard {self.shard.index}: it has no backup")

    def load(self, record: ShardRecord) -> None:
        self.release()
        data = encode_record(record, "none")
        buffer = BufferPool(-(-len(data) // 4), keeps=False).take()
        buffer.bytes[: len(data)] = data
        self.install(buffer, record.version, len(data))


# ---- A dense shard's tensors on its primary or backup. Decisions are made elsewhere ----


# The loss scale in a shard of buffers: two words that follow from what servers decide, not from contributions.


class ScaleWords:
    """Reads and updates the loss scale in a shard's `master` (1-D fp32), from its word `at`."""

    def __init__(self, rule: LossScaling, master: torch.Tensor, at: int) -> None:
        self._rule, self._words = rule, master[at : at + 2]

    def keep(self) -> list[float]:
        """The loss scale, and how many updates it has: before an update."""
        return self._words.tolist()

    def advance(self, before: list[float], *, skipped: bool) -> None:
        """Set the words after an update (`skipped`: that changes nothing else), from what they were before it."""
        scale, applied = before
        after = self._rule.after(scale, int(applied), skipped=skipped)
        self._words[:] = torch.tensor(after, dtype=torch.float32, device="cpu")


def scale_words(config: JobConfig, shard: Shard, entries: Iterable[Entry], master: torch.Tensor) -> ScaleWords | None:
    """The loss scale, if it is in this shard."""
    places = (e.start - shard.start for e in entries if e.spec.name == ENTRY and e.spec.group < 0)
    return next((ScaleWords(config.loss_scale, master, at) for at in places if 0 <= at < shard.words), None)


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
        self._scale = scale_words(config, shard, entries, self.master)
        self.mean = _stays if isinstance(config.applied, Sum) else self._sum.mean
        self.norms, self.abandon = self._sum.norms, self._sum.abandon
        self.merge, self.discard = self._sum.merge, self._sum.discard
        self.raw, self.encoded = self._wire.raw, self._wire.encoded

    @property
    def loss_scale(self) -> float:
        return 0.0 if self._scale is None else self._scale.keep()[0]

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """Set the first version. Its buffer becomes the wire copy."""
        self.master.copy_(payload.tensor[: self.shard.words])
        self._wire.keep(version, payload, version)
        if self._average is not None:
            self._average.begin()

    def take(self, payload: Buffer, weight: float, base: int | None = None, at: int = 0) -> None:
        if base is not None:
            self.compensate(payload, base)
        self._sum.take(payload, weight, at)

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
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
            return first_not_finite(self._sum.values)
        return first_that_became(self._floats, self._sum.values, self.master)

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        """Update the master with the finished gradient, and keep a wire copy of the new version.

        The gradient's buffer becomes the wire copy. With `replicate` the wire copy gets a new buffer, and the scaled
        gradient's buffer is returned, with its bytes, for the backup.
        """
        scale, kept = update.scale, None if self._scale is None else self._scale.keep()
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
        if self._scale is not None and kept is not None:
            self._scale.advance(kept, skipped=scale is None)
        finished = self._sum.leave()
        wire.tensor[: self.master.numel()].copy_(self.master)
        self._wire.keep(update.version, wire, update.oldest, update.pinned)
        return (finished, self.shard.nbytes) if update.replicate else None

    def release(self) -> None:
        self.abandon()
        self._wire.release()

    def keeps(self, version: int) -> bool:
        return version in self._wire

    def named(self, header: Header) -> Header:
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
    named = [name for name in record.arrays if name.startswith(_WIRE)]
    wires = {name for name in named if is_version(name.removeprefix(_WIRE), record.version)}
    moments = record.arrays.keys() - wires - {"master"}
    nothing: tuple[set[str], set[str]] = (set(), set())
    known = [nothing] if shard.role == "buffers" else state_names(of_shard(config.applied, shard.columns))
    numbers = set(record.scalars)
    if config.average is not None and shard.role == "parameters":
        count = record.scalars.get(AVERAGED, -1.0)
        if AVERAGE not in moments or count < 0 or not count.is_integer():
            return False
        moments, numbers = moments - {AVERAGE}, numbers - {AVERAGED}
    right = (moments, numbers) in known and len(record.clocks) == config.clocks(shard.role)
    same = all(len(array) == shard.words and array.dtype == np.float32 for array in record.arrays.values())
    return "master" in record.arrays and f"{_WIRE}{record.version}" in wires and right and same


def is_version(text: str, newest: int) -> bool:
    """Is it a version's number, of a version no newer than that?"""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(newest)) and int(text) <= newest


# A dense shard whose versions workers do not follow: they hear that one exists, and pull the words that they need.


class StreamedShard(OwnedShard):
    """Like OwnedShard; what it sends to followers is empty."""

    def __init__(self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch, nothing: Buffer) -> None:
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


# A dense shard of a model in the same process: see `optim.InPlace`.


class PiecesSum:
    """The sum of a shard's gradient, as the model has it: one contribution, of all replicas. It has `GradientSum`'s
    methods.
    """

    def __init__(self, shard: int, model: InPlace) -> None:
        self._shard, self._model = shard, model
        self.values = Pieces(())

    def take(self, payload: Buffer, weight: float, at: int = 0) -> None:
        """Make the model's gradient, times `weight`, the sum."""
        payload.release()
        self.values = self._model.gradients.pop(self._shard)
        if weight != 1.0:
            self.values.mul_(weight)

    def add(self, *_: object) -> None:
        """AssertionError: there is one contribution. So do `merge` and `discard`."""
        raise AssertionError(f"shard {self._shard}: all replicas contribute at once")

    merge = discard = add

    def mean(self, total_weight: float) -> None:
        if total_weight != 1.0:
            self.values.mul_(1.0 / total_weight)

    def norms(self) -> tuple[float, ...]:
        return norms_of(self.values.flat())

    def first_not_finite(self) -> int:
        at = 0
        for part in () if self.values.finite else self.values.parts:
            if (found := first_not_finite(part)) >= 0:
                return at + found
            at += part.numel()
        return -1

    def leave(self) -> Pieces:
        values, self.values = self.values, Pieces(())
        return values

    def abandon(self) -> None:
        self.values = Pieces(())


class InPlaceShard:
    """The model's own parameters, and their optimizer's state. Nothing is sent.

    A version is what the parameters are now: no other one is kept.
    """

    measured = True
    loss_scale = 0.0

    def __init__(self, shard: Shard, config: JobConfig, model: InPlace, nothing: Buffer) -> None:
        self.shard, self._model, self._nothing = shard, model, nothing
        self._words = model.parameters[shard.index]
        self._optimizer = ShardOptimizer(config, shard.group, shard.words, pieces=self._words)
        self._sum, self._version = PiecesSum(shard.index, model), -1
        self._spends_gradient = isinstance(config.applied, SGD) and config.applied.nesterov  # as in `OwnedShard`
        self.mean, self.norms, self.abandon = self._sum.mean, self._sum.norms, self._sum.abandon
        self.merge, self.discard = self._sum.merge, self._sum.discard
        self.first_not_finite = self._sum.first_not_finite

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """Set the first version's number: the model has its values."""
        payload.release()
        self._model.updates.pop(self.shard.index, None)
        self._version = version

    def take(self, payload: Buffer, weight: float, base: int | None = None, at: int = 0) -> None:
        self._sum.take(payload, weight)

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        self._sum.add(payload, weight)

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        """Prepare the update of the parameters. Always returns None."""
        assert not update.replicate, f"shard {self.shard.index} has a backup"
        self._model.updates[self.shard.index] = partial(self._step, self._sum.leave(), update)
        self._version = update.version
        return None

    def _step(self, gradient: Pieces, update: Apply) -> None:
        if update.scale is None:
            return
        if update.scale != 1.0:
            gradient.mul_(update.scale)
        if self._spends_gradient:
            gradient.owned()
        self._optimizer.apply(gradient, update.step, update.rate, update.reductions)

    def release(self) -> None:
        self.abandon()
        self._model.updates.pop(self.shard.index, None)
        self._version = -1

    def keeps(self, version: int) -> bool:
        """Is it what the parameters are now?"""
        return version == self._version

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """An empty payload: the worker only hears that the version exists."""
        return 0, self._nothing, 0

    encoded = raw

    def named(self, header: Header) -> Header:
        return header

    def digest(self, before: bytes) -> bytes:
        raise AssertionError(f"shard {self.shard.index}: it has no backup")

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        moments, scalars = self._optimizer.state()
        arrays = {"master": self._words.flat(), **moments}
        return ShardRecord(self.shard.index, version, {n: a.numpy() for n, a in arrays.items()}, scalars, tuple(clocks))

    def load(self, record: ShardRecord) -> None:
        """Replace the whole state by that of a snapshot's record."""
        self.abandon()
        self._model.updates.pop(self.shard.index, None)
        arrays = {name: torch.from_numpy(array) for name, array in record.arrays.items()}
        self._words.copy_(arrays.pop("master"))
        self._optimizer.load({n: a for n, a in arrays.items() if n != AVERAGE}, {
            n: s for n, s in record.scalars.items() if n != AVERAGED
        })  # fmt: skip
        self._version = record.version


class InPlaceMean(AveragedShard):
    """Like AveragedShard; a mean stays in the gradients' memory, where the worker's optimizer takes it."""

    def __init__(
        self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch, model: InPlace, nothing: Buffer
    ) -> None:
        self._model, self._nothing, self._pieces = model, nothing, PiecesSum(shard.index, model)
        super().__init__(shard, config, pool, scratch, self._pieces)

    def _finished(self, scale: float) -> Buffer:
        gradient = self._pieces.leave()
        self._model.means[self.shard.index] = gradient if scale == 1.0 else gradient.mul_(scale)
        return self._nothing.retain()

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """The first version's record; of others nothing: the worker only hears that the mean exists."""
        return super().raw(version) if version == self._begun_at else (0, self._nothing, 0)

    encoded = raw
