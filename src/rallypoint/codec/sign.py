"""One bit a word, and one scale for each block: the mean magnitude.

    scales   fp32, one for each block
    bits     word i is bit i % 8 of byte i // 8; set for a negative word

Karimireddy et al., 2019, "Error Feedback Fixes SignSGD", algorithm 1 (there with one scale for the whole vector). The
scaled sign alone does not converge: wrap it in ErrorFeedback.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rallypoint.codec.base import Bits, Scratch, require_finite
from rallypoint.codec.blocks import BlockCodec

_LARGEST = torch.finfo(torch.float32).max
_SIGN = -(1 << 31)


class SignCodec(BlockCodec):
    """Each word as plus or minus its block's mean magnitude: 3.2 % of fp32 in blocks of 1024.

    Zeros, of either sign, count as positive. The error's 2-norm is never above the values' own. NaN and infinities
    raise NonFinitePayload. Scratch: two pieces and the mask.
    """

    code = 7
    name = "sign"
    largest_scale = _LARGEST

    def __init__(self, block: int, scratch: Scratch | None = None) -> None:
        super().__init__(block, scratch)
        self._shifts = torch.arange(31, -1, -1, dtype=torch.int32, device="cpu")

    def _body_bytes(self, words: int) -> int:
        return words // 8

    def _pack(self, padded: Tensor, words: int, scales: Tensor, packed: Tensor, bits: Bits) -> None:
        magnitude = torch.abs(padded, out=self._scratch.floats(0, padded.numel())).view(-1, self.block)
        torch.sum(magnitude, 1, out=scales).mul_(1 / self.block)
        if not math.isfinite(float(scales.amax())):
            require_finite(padded, self.name)
            torch.sum(magnitude.mul_(1 / self.block), 1, out=scales)  # the magnitudes are finite, but their sum was not
        if words % self.block:
            scales[-1] *= self.block / (words % self.block)
        scales.clamp_(max=_LARGEST)
        negative = self._scratch.mask(padded.numel()).numpy()
        np.less(padded.numpy(), np.float32(0), out=negative)
        packed.copy_(torch.from_numpy(np.packbits(negative, bitorder="little")))

    def _unpack(self, scales: Tensor, packed: Tensor, target: Tensor) -> None:
        words = target.view(torch.int32)
        torch.bitwise_left_shift(packed.view(torch.int32).unsqueeze(1), self._shifts, out=words.view(-1, 32))
        words.bitwise_and_(_SIGN)
        words.view(-1, self.block).bitwise_or_(scales.view(torch.int32).unsqueeze(1))
