"""Raw fp32, and rounding every word to 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from rallypoint.codec.base import Bits, PieceCodec, Scratch, pieces


class CastCodec(PieceCodec):
    """Words in another floating-point format: 2 or 4 bytes each, NaN and infinities included.

    Rounds to nearest, ties to even: the error is at most 2^-11 (fp16) or 2^-8 (bf16) of the value in the normal range.
    A value beyond the format's largest (65504 in fp16) becomes an infinity, which the servers then see. `raw_codec`,
    `fp16_codec` and `bf16_codec` make the three existing ones. Scratch: one piece.
    """

    carries_nonfinite = True

    def __init__(self, code: int, dtype: torch.dtype, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        self.code = code
        self.lossless = dtype is torch.float32
        self._dtype = dtype

    def bytes_for(self, words: int) -> int:
        return words * self._dtype.itemsize

    def _write(self, values: Tensor, body: Tensor, start: int, words: int, bits: Bits) -> None:
        body.view(self._dtype)[start : start + values.numel()].copy_(values)

    def _read(self, body: Tensor, target: Tensor, start: int, words: int) -> None:
        target.copy_(body.view(self._dtype)[start : start + target.numel()])

    def decode_add(self, payload: memoryview, into: Tensor, weight: float = 1.0) -> None:
        if weight != 1.0:
            return super().decode_add(payload, into, weight)
        into, body = self._open(payload, into)  # torch converts while it adds: no scratch needed
        for start, stop in pieces(into.numel()):
            into[start:stop].add_(body.view(self._dtype)[start:stop])
        return None


def raw_codec(scratch: Scratch | None = None) -> CastCodec:
    """fp32 as it is: 4 bytes a word, lossless, code 0."""
    return CastCodec(0, torch.float32, scratch)


def fp16_codec(scratch: Scratch | None = None) -> CastCodec:
    """IEEE half precision: 2 bytes a word, code 1."""
    return CastCodec(1, torch.float16, scratch)


def bf16_codec(scratch: Scratch | None = None) -> CastCodec:
    """bfloat16: 2 bytes a word, fp32's range, code 2."""
    return CastCodec(2, torch.bfloat16, scratch)
