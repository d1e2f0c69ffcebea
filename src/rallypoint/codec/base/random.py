"""Random bits from a seed: the same on every machine. One draw gives four 16-bit values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_SEED_MASK = (1 << 64) - 1

Array = np.ndarray[Any, np.dtype[Any]]


def source(seed: int) -> np.random.BitGenerator:
    """Return a generator of raw bits from the low 64 bits of `seed`. Its stream is the same in all numpy versions."""
    return np.random.SFC64(seed & _SEED_MASK)


def draw(seed: int, sizes: Array) -> Array:
    """For each size in `sizes` (int64, 1 to 2^32) draw an int64 from 0 to size - 1.

    The bias is at most 2^-32 of the size.
    """
    raw = np.asarray(source(seed).random_raw(len(sizes)), dtype=np.uint64)
    return ((raw >> np.uint64(32)) * sizes.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


class Bits:
    """A stream of random 16-bit numbers, made only on request."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._source: np.random.BitGenerator | None = None

    def dither(self, out: Tensor) -> Tensor:
        """Fill `out` (1-D fp32) with uniform numbers in -1/2..1/2, in steps of 2^-16, symmetric around zero."""
        if self._source is None:
            self._source = source(self._seed)
        drawn = np.asarray(self._source.random_raw(-(-out.numel() // 4)), dtype="<u8").view("<i2")
        return out.copy_(torch.from_numpy(drawn[: out.numel()])).add_(0.5).mul_(2.0**-16)
