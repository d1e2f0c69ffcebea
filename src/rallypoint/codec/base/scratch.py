"""Scratch buffers: codecs process long shards in pieces that stay in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE_WORDS = 1 << 17  # 512 KiB: a piece, its source and its result fit a 2 MiB second-level cache
_BUFFERS = 3


class Scratch:
    """Three buffers of one piece (512 KiB each), a mask (128 KiB) and a whole shard's words, allocated on first use.

    Codecs that run on the same thread can share one.
    """

    def __init__(self) -> None:
        self._floats: list[Tensor | None] = [None] * _BUFFERS
        self._mask: Tensor | None = None
        self._whole = torch.empty(0, dtype=torch.float32, device="cpu")

    def floats(self, which: int, words: int) -> Tensor:
        """Return the first `words` fp32 words of buffer `which` (0 to 2), at most a piece; contents undefined."""
        buffer = self._floats[which]
        if buffer is None:
            buffer = self._floats[which] = torch.empty(PIECE_WORDS, dtype=torch.float32, device="cpu")
        return buffer[:words]

    def mask(self, words: int) -> Tensor:
        """Return the first `words` booleans of the mask; the contents are undefined."""
        if self._mask is None:
            self._mask = torch.empty(PIECE_WORDS, dtype=torch.bool, device="cpu")
        return self._mask[:words]

    def whole(self, words: int) -> Tensor:
        """Return `words` fp32 words, any number; contents undefined.

        For wrappers around a codec, not for codecs themselves.
        """
        if self._whole.numel() < words:
            self._whole = torch.empty(words, dtype=torch.float32, device="cpu")
        return self._whole[:words]


def pieces(words: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (start, stop) of at most PIECE_WORDS that make up `words`."""
    for start in range(0, words, PIECE_WORDS):
        yield start, min(start + PIECE_WORDS, words)
