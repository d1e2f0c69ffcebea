"""The sum in progress of one dense shard, and whether values are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from rallypoint.codec.base import all_finite
from rallypoint.core.layout import Entry, Shard
from rallypoint.net.pool import Buffer


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
        return self.buffer.tensor[: self._words]

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
        """Drop the part that begins at replica `at`."""
        self._parts.pop(at).release()

    def add(self, payload: Buffer, weight: float) -> None:
        """Add a contribution, times its weight. Multiplying first gives the same rounding for any cut into shards."""
        values = payload.tensor[: self._words]
        if weight != 1.0:
            values.mul_(weight)
        self.values.add_(values)
        payload.release()

    def mean(self, total_weight: float) -> None:
        """Multiply the sum by 1 / `total_weight`: the weighted mean."""
        if total_weight != 1.0:
            self.values.mul_(1.0 / total_weight)

    def norm(self) -> float:
        """The 2-norm of the sum (after `mean`: of the mean)."""
        return norm_of(self.values)

    def first_not_finite(self) -> int:
        """The first word that is not finite; -1 if all are."""
        return first_not_finite(self.values)

    def leave(self) -> Buffer:
        """Return the finished gradient's buffer. The caller must release it."""
        return self._parts.pop(0)

    def abandon(self) -> None:
        """Discard the sum and release its buffers."""
        for at in list(self._parts):
            self.discard(at)

    def _values(self, at: int) -> torch.Tensor:
        return self._parts[at].tensor[: self._words]


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
