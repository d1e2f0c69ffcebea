"""Codecs that shorten every word: casts, blocks of whole numbers, signs."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from rallypoint.codec.base import (
    PIECE_WORDS,
    Array,
    Bits,
    PieceCodec,
    Scratch,
    nonfinite,
    pieces,
    require_finite,
    within,
)
from rallypoint.errors import ConfigError

# ---- Raw fp32, and rounding every word to 16 bits ----

BF16 = 2  # the code of bfloat16


class CastCodec(PieceCodec):
    """Words in another floating-point format: 2 or 4 bytes each, NaN and infinities included.

    Rounds to nearest, ties to even: the error is at most 2^-11 (fp16) or 2^-8 (bf16) of the value in the normal range.
    A value beyond the format's largest (65504 in fp16) becomes an infinity, which the servers then see. In fp32
    nothing is lost. Scratch: one piece.
    """

    carries_nonfinite = True

    def __init__(self, dtype: torch.dtype, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        self.code = {torch.float32: 0, torch.float16: 1, torch.bfloat16: BF16}[dtype]
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


# ---- Small integers with one fp32 scale for each block: int8 and int4 ----
#
#     scales   fp32, one for each block
#     words    int8: one byte each; int4: two to a byte, see Int4Codec
#
# The last block is sent whole, filled with zeros. A block's scale is its largest magnitude divided by the largest
# integer (absmax quantisation, as in Dettmers, 2016, "8-Bit Approximations for Parallelism in Deep Learning", and
# Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization", section 2.1, with a linear code).

SCALE_BYTES = 4
_SMALLEST = 2.0**-118  # below it the inverse of a scale would overflow: such a block is sent as zeros
_LARGEST = torch.finfo(torch.float32).max


class BlockCodec(PieceCodec):
    """A payload of one scale for each `block` words: first all scales, then the words."""

    name: str
    largest_scale: float
    word_bits: int

    def __init__(self, block: int, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        if not (32 <= block <= PIECE_WORDS and block & (block - 1) == 0):
            raise ConfigError(f"{self.name} blocks of {block} words: use a power of two from 32 to {PIECE_WORDS}")
        self.block = block

    def rows(self, words: int) -> int:
        """The number of blocks that `words` words take."""
        return -(-words // self.block)

    def _body_bytes(self, words: int) -> int:
        """The bytes of `words` words (whole blocks) without the scales."""
        return words * self.word_bits // 8

    @abstractmethod
    def _pack(self, padded: Tensor, words: int, scales: Tensor, packed: Tensor, bits: Bits) -> None:
        """Encode whole blocks, of which the first `words` words are real, into `scales` and `packed` (uint8)."""

    @abstractmethod
    def _unpack(self, scales: Tensor, packed: Tensor, target: Tensor) -> None:
        """Decode whole blocks into `target`."""

    def bytes_for(self, words: int) -> int:
        rows = self.rows(words)
        return SCALE_BYTES * rows + self._body_bytes(rows * self.block)

    def _write(self, values: Tensor, body: Tensor, start: int, words: int, bits: Bits) -> None:
        scales, packed = self._place(body, start, values.numel(), words)
        padded = values
        if values.numel() % self.block:
            padded = self._scratch.floats(1, self.rows(values.numel()) * self.block)
            padded[: values.numel()].copy_(values)
            padded[values.numel() :].zero_()
        self._pack(padded, values.numel(), scales, packed, bits)

    def _read(self, body: Tensor, target: Tensor, start: int, words: int) -> None:
        scales, packed = self._place(body, start, target.numel(), words)
        if target.numel() % self.block == 0:
            self._unpack(scales, packed, target)
            return
        padded = self._scratch.floats(1, scales.numel() * self.block)
        self._unpack(scales, packed, padded)
        target.copy_(padded[: target.numel()])

    def _check(self, body: Tensor, words: int) -> None:
        scales = body[: SCALE_BYTES * self.rows(words)].view(torch.float32)
        within(scales, 0.0, self.largest_scale, f"{self.name} scales")

    def _place(self, body: Tensor, start: int, length: int, words: int) -> tuple[Tensor, Tensor]:
        """The scales and the words of the piece that starts at word `start`."""
        first, rows, all_rows = start // self.block, self.rows(length), self.rows(words)
        scales = body[SCALE_BYTES * first : SCALE_BYTES * (first + rows)].view(torch.float32)
        offset = SCALE_BYTES * all_rows + self._body_bytes(start)
        return scales, body[offset : offset + self._body_bytes(rows * self.block)]


class IntCodec(BlockCodec):
    """Integers from -`levels` to `levels`. Rounds to nearest, or (`stochastic`) randomly so that the mean is the value.

    The error of a word is at most half a scale (nearest) or one scale (stochastic; Alistarh et al., 2017, "QSGD",
    section 3.1, with absmax blocks), plus a rounding error of 2^-22 of the block's largest magnitude. The stochastic
    mean is the value up to 2^-17 of a scale. A block whose largest magnitude is below 2^-118 decodes to zeros. A block
    whose largest magnitude is near the end of fp32's range is clipped (int8: above 127/128 of it, int4: above 7/8). NaN
    and infinities raise NonFinitePayload. Scratch: three pieces.
    """

    levels: int

    def __init__(self, block: int, *, stochastic: bool = False, scratch: Scratch | None = None) -> None:
        super().__init__(block, scratch)
        self.stochastic = stochastic
        self.largest_scale = _LARGEST / (self.levels + 1)  # nothing decodes to an infinity, not even a forged payload

    def _quantise(self, padded: Tensor, scales: Tensor, bits: Bits) -> Tensor:
        """Return the integers, as floats in scratch buffer 0, and write the scales."""
        whole = self._scratch.floats(0, padded.numel())
        grid = whole.view(-1, self.block)
        torch.abs(padded, out=whole)
        torch.amax(grid, 1, out=scales)
        inverse = self._invert(scales.numpy())
        torch.mul(padded.view(-1, self.block), torch.from_numpy(inverse).unsqueeze(1), out=grid)
        if self.stochastic:
            whole.add_(bits.dither(self._scratch.floats(2, padded.numel())))
            whole.round_().clamp_(-self.levels, self.levels)
        else:
            whole.round_()
        return whole

    def _invert(self, peaks: Array) -> Array:
        """Turn the blocks' largest magnitudes into scales, in place. Returns the factors to multiply the words with. In
        numpy, because torch's calls on so few numbers would take a quarter of the encoding's time."""
        if not math.isfinite(peaks.max()):
            raise nonfinite(self.name)
        levels = np.float32(self.levels)
        nothing = peaks < _SMALLEST
        peaks[nothing] = np.inf
        inverse: Array = levels / peaks
        peaks[nothing] = 0.0
        peaks /= levels
        np.minimum(peaks, np.float32(self.largest_scale), out=peaks)
        return inverse


class Int8Codec(IntCodec):
    """One byte a word, -127 to 127, and 4 bytes a block: 25.4 % of fp32 in blocks of 256."""

    code = 3
    name = "int8"
    levels, word_bits = 127, 8

    def _pack(self, padded: Tensor, words: int, scales: Tensor, packed: Tensor, bits: Bits) -> None:
        packed.view(torch.int8).copy_(self._quantise(padded, scales, bits))

    def _unpack(self, scales: Tensor, packed: Tensor, target: Tensor) -> None:
        target.copy_(packed.view(torch.int8))
        target.view(-1, self.block).mul_(scales.unsqueeze(1))


class Int4Codec(IntCodec):
    """Two words a byte, -7 to 7, and 4 bytes a block: 14.1 % of fp32 in blocks of 64.

    In each piece of 128 Ki words (the last is shorter) byte i is a signed 16 * b + a, where a is word i of the piece's
    first half and b word i of its second.
    """

    code = 4
    name = "int4"
    levels, word_bits = 7, 4

    def _pack(self, padded: Tensor, words: int, scales: Tensor, packed: Tensor, bits: Bits) -> None:
        first, second = self._quantise(padded, scales, bits).chunk(2)
        packed.view(torch.int8).copy_(second.mul_(16.0).add_(first))

    def _unpack(self, scales: Tensor, packed: Tensor, target: Tensor) -> None:
        both = self._scratch.floats(2, packed.numel()).copy_(packed.view(torch.int8))
        first, second = target.chunk(2)
        torch.mul(both, 1 / 16, out=second).round_()
        torch.mul(second, -16.0, out=first).add_(both)
        target.view(-1, self.block).mul_(scales.unsqueeze(1))


# ---- One bit a word, and one scale for each block: the mean magnitude ----
#
#     scales   fp32, one for each block
#     bits     word i is bit i % 8 of byte i // 8; set for a negative word
#
# Karimireddy et al., 2019, "Error Feedback Fixes SignSGD", algorithm 1 (there with one scale for the whole vector). The
# scaled sign alone does not converge: wrap it in ErrorFeedback.

_SIGN = -(1 << 31)


class SignCodec(BlockCodec):
    """Each word as plus or minus its block's mean magnitude: 3.2 % of fp32 in blocks of 1024.

    Zeros, of either sign, count as positive. The error's 2-norm is never above the values' own. NaN and infinities
    raise NonFinitePayload. Scratch: two pieces and the mask.
    """

    code = 7
    name = "sign"
    largest_scale, word_bits = _LARGEST, 1

    def __init__(self, block: int, scratch: Scratch | None = None) -> None:
        super().__init__(block, scratch)
        self._shifts = torch.arange(31, -1, -1, dtype=torch.int32, device="cpu")

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
