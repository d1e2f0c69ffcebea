"""Random bits from a seed: the same on every machine, and four values to one draw."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_SEED_MASK = (1 << 64) - 1


def generator(seed: int) -> np.random.Generator:
    """A generator that depends on the low 64 bits of `seed` only."""
    return np.random.Generator(np.random.SFC64(seed & _SEED_MASK))


class Bits:
    """A stream of random 16-bit numbers; nothing is made before the first is asked for."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._source: np.random.BitGenerator | None = None

    def dither(self, out: Tensor) -> Tensor:
        """Fill `out` (1-D fp32) with numbers uniform in -1/2..1/2, in steps of 2^-16, symmetric around zero."""
        if self._source is None:
            self._source = generator(self._seed).bit_generator
        drawn = np.asarray(self._source.random_raw(-(-out.numel() // 4)), dtype="<u8").view("<i2")
        return out.copy_(torch.from_numpy(drawn[: out.numel()])).add_(0.5).mul_(2.0**-16)
