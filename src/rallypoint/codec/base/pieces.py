"""The base of codecs of fixed size: they encode and decode piece by piece, independently."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from rallypoint.codec.base.payload import body_of_exactly, checked, room
from rallypoint.codec.base.random import Bits
from rallypoint.codec.base.scratch import Scratch, pieces


class PieceCodec(ABC):
    """A codec whose payload has a fixed length and can be written and read in pieces.

    Scratch: `decode_add` uses buffer 0; the format uses the others, and buffer 0 while writing.
    """

    code: int
    lossless = False
    carries_nonfinite = False

    def __init__(self, scratch: Scratch | None = None) -> None:
        self._scratch = scratch or Scratch()

    @abstractmethod
    def bytes_for(self, words: int) -> int:
        """Return exactly the bytes that `words` words take."""

    @abstractmethod
    def _write(self, values: Tensor, body: Tensor, start: int, words: int, bits: Bits) -> None:
        """Encode `values`, which start at word `start` of `words`, into their place in `body`."""

    @abstractmethod
    def _read(self, body: Tensor, target: Tensor, start: int, words: int) -> None:
        """Decode into `target` the piece that starts at word `start` of `words` and has `target`'s length."""

    def _check(self, body: Tensor, words: int) -> None:  # noqa: B027 - most formats cannot say anything impossible
        """Raise ProtocolError when a payload of the right length holds impossible values."""

    def encode(self, values: Tensor, out: memoryview, *, seed: int) -> int:
        values = checked(values)
        words = values.numel()
        nbytes = self.bytes_for(words)
        body = room(out, nbytes)
        bits = Bits(seed)
        for start, stop in pieces(words):
            self._write(values[start:stop], body, start, words, bits)
        return nbytes

    def decode(self, payload: memoryview, into: Tensor) -> None:
        into, body = self._open(payload, into)
        words = into.numel()
        for start, stop in pieces(words):
            self._read(body, into[start:stop], start, words)

    def decode_add(self, payload: memoryview, into: Tensor, weight: float = 1.0) -> None:
        into, body = self._open(payload, into)
        words = into.numel()
        for start, stop in pieces(words):
            piece = self._scratch.floats(0, stop - start)
            self._read(body, piece, start, words)
            if weight != 1.0:
                piece.mul_(weight)
            into[start:stop].add_(piece)

    def _open(self, payload: memoryview, into: Tensor) -> tuple[Tensor, Tensor]:
        into = checked(into)
        words = into.numel()
        body = body_of_exactly(payload, self.bytes_for(words), words)
        self._check(body, words)
        return into, body
