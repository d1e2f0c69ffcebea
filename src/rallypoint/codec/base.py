"""What a codec is: payloads, checks, and error feedback."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rallypoint.core.sums import leaf_digest
from rallypoint.errors import ProtocolError, RallypointError, UsageError

# ---- The interface of every codec ----


class NonFinitePayload(RallypointError):
    """The values hold a NaN or an infinity, which this codec's format cannot carry."""


class Codec(Protocol):
    """Writes one shard's values as bytes and reads them back.

    Values are 1-D contiguous fp32 CPU tensors; anything else raises UsageError. An instance uses scratch buffers and
    belongs to one thread at a time. An instance without state serves shards of any size. A `Stateful` one belongs to
    one shard of one replica.

    Attributes:
        code: the wire format's number in the frame header; 0 is raw fp32.
        lossless: True if decoding returns exactly the bytes that were encoded.
        carries_nonfinite: True if NaN and infinities arrive as such. If not, `encode` raises NonFinitePayload on them.
    """

    @property
    def code(self) -> int: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def carries_nonfinite(self) -> bool: ...

    def bytes_for(self, words: int) -> int:
        """Return the bytes that `words` words take: exactly, or at most where the size depends on the values."""

    def encode(self, values: Tensor, out: memoryview, *, seed: int) -> int:
        """Write `values` (not modified) to the beginning of `out`. Returns the bytes used.

        Every random choice comes from `seed`, a number that the caller derives from (job seed, step, replica, shard):
        the same values, state and seed give the same bytes. `out` must start on a 4-byte boundary and have room for
        `bytes_for`, else UsageError. Raises NonFinitePayload on NaN or infinity where the format cannot carry them.
        Then the codec's state is unchanged, and the content of `out` is undefined.
        """

    def decode(self, payload: memoryview, into: Tensor) -> None:
        """Decode `payload` into `into`, overwriting it.

        Raises ProtocolError when the payload is invalid for `into`'s size.

        Nothing in a payload is trusted: lengths, counts, indices and scales are checked before `into` is changed. A
        payload that is read-only or does not start on a 4-byte boundary is copied first.
        """

    def decode_add(self, payload: memoryview, into: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the decoded `payload` to `into`.

        The result has the same bytes as decoding, multiplying by `weight` and adding, each step rounded. Two
        exceptions: sparse formats add nothing where they sent nothing (so -0.0 stays -0.0), and low-rank formats add
        inside the product.
        """


@runtime_checkable
class Stateful(Protocol):
    """A codec with state: it keeps values of a shard from step to step (a residual, momentum, factors)."""

    def state(self) -> dict[str, Tensor]:
        """Return the state by name, as views and not copies."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Copy a state that `state` returned elsewhere. Raises UsageError when names or shapes are not this codec's."""

    def reset(self) -> None:
        """Return to the state after construction."""


# ---- Scratch buffers: codecs process long shards in pieces that stay in a core's cache ----

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


# ---- Random bits from a seed: the same on every machine. One draw gives four 16-bit values ----

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


# ---- A payload's bytes as tensors, and checks of a codec's arguments ----

ALIGNMENT = 4  # bytes


def checked(values: Tensor) -> Tensor:
    """Return the tensor without its graph. Raises UsageError unless it is 1-D, contiguous, fp32 and on the CPU."""
    if values.dtype is not torch.float32 or values.dim() != 1 or values.device.type != "cpu":
        raise UsageError(
            f"a codec works on 1-D float32 tensors on the CPU, not on {values.dim()}-D {values.dtype} on "
            f"{values.device}: pass values.reshape(-1).float().cpu()"
        )
    if not values.is_contiguous():
        raise UsageError(f"a codec works on contiguous tensors, not on one of stride {values.stride(0)}: copy it first")
    return values.detach()


def room(out: memoryview, nbytes: int) -> Tensor:
    """Return the first `nbytes` of `out` as uint8. Raises UsageError when it is too small, read-only or not aligned."""
    if out.readonly or not out.c_contiguous or out.nbytes < nbytes:
        raise UsageError(f"a payload of {nbytes} bytes does not fit a buffer of {out.nbytes}: it must be writable too")
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    body = torch.frombuffer(out, dtype=torch.uint8, count=nbytes)
    if body.data_ptr() % ALIGNMENT:
        raise UsageError(f"a payload must be written to an address that is a multiple of {ALIGNMENT}")
    return body


def body_of(payload: memoryview) -> Tensor:
    """Return a payload's bytes as uint8 on a 4-byte boundary, without a copy where possible."""
    if not payload.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if not payload.readonly and payload.c_contiguous:
        body = torch.frombuffer(payload, dtype=torch.uint8)
        if body.data_ptr() % ALIGNMENT == 0:
            return body
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def body_of_exactly(payload: memoryview, nbytes: int, words: int) -> Tensor:
    """Return `body_of(payload)`. Raises ProtocolError when the payload is not `nbytes` long."""
    if payload.nbytes != nbytes:
        raise ProtocolError(f"a payload of {payload.nbytes} bytes for {words} words: {nbytes} were expected")
    return body_of(payload)


def all_finite(values: Tensor) -> bool:
    """True if there is neither NaN nor infinity.

    Usually one pass: a sum is finite only if its terms are, save for overflow.
    """
    if math.isfinite(float(values.sum())):
        return True
    return all(bool(torch.isfinite(values[start:stop]).all()) for start, stop in pieces(values.numel()))


def require_finite(values: Tensor, format_name: str) -> None:
    """Raise NonFinitePayload unless all values are finite."""
    if not all_finite(values):
        raise nonfinite(format_name)


def nonfinite(format_name: str) -> NonFinitePayload:
    """Return the error to raise for values that are not finite."""
    return NonFinitePayload(
        f"the values to send hold NaN or infinity, which {format_name} cannot carry: skip the step, or send it raw"
    )


def within(numbers: Tensor, low: float, high: float, what: str) -> None:
    """Raise ProtocolError unless every one of `numbers` is in low..high (a NaN never is)."""
    if numbers.numel():
        least, most = float(numbers.amin()), float(numbers.amax())
        if not (low <= least and most <= high):
            raise ProtocolError(f"a payload has {what} from {least} to {most}: {low} to {high} are possible")


# ---- The base of codecs of fixed size: they encode and decode piece by piece, independently ----


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


# ---- Rows of a table and their gradients as payloads: only the rows that a batch uses are sent ----
#
#     count (u32), `count` row numbers within the part (u32, ascending), `count` rows of fp32 values
#
# Little-endian, no padding. A payload of no rows is only its count.

_ID = np.dtype("<u4")
_HEAD = 4


def gradient_bytes(count: int, columns: int) -> int:
    """Return the bytes of a payload of `count` rows of `columns` values."""
    return _HEAD + count * (_ID.itemsize + 4 * columns)


def encode_gradient(ids: torch.Tensor, values: torch.Tensor, into: memoryview | None = None) -> memoryview:
    """Encode the rows `ids` (1-D int64, ascending) with `values` (fp32, len(ids) by columns).

    Writes `into` memory of `gradient_bytes`, or into new memory if None.
    """
    count, columns = len(ids), values.shape[1]
    data = memoryview(bytearray(gradient_bytes(count, columns))) if into is None else into
    words = np.frombuffer(data, _ID)
    words[0] = count
    words[1 : 1 + count] = ids.numpy()
    words[1 + count :].view("<f4").reshape(count, columns)[:] = values.numpy()
    return data


def check_gradient(data: memoryview, rows: int, columns: int) -> None:
    """Raise ProtocolError unless `data` is a payload for a part of `rows` rows and `columns` columns."""
    words = np.frombuffer(data, _ID, len(data) // _ID.itemsize)
    count = int(words[0]) if len(words) else -1
    if count < 0 or count > rows or len(data) != gradient_bytes(count, columns):
        raise ProtocolError(f"{len(data)} bytes that claim to be {count} rows of a part that has {rows}")
    check_ids(words[1 : 1 + count], rows)


def check_ids(ids: np.ndarray[tuple[int], np.dtype[np.uint32]], rows: int) -> None:
    """Raise ProtocolError unless `ids` are ascending row numbers of a part of `rows` rows."""
    if len(ids) and (int(ids[-1]) >= rows or not bool(np.all(ids[1:] > ids[:-1]))):
        raise ProtocolError(f"row numbers that do not ascend, or not of a part that has {rows} rows")


def decode_gradient(data: memoryview, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row numbers (int64), and the values as a view of `data` (fp32, count by columns).

    Check `data` first.
    """
    words = np.frombuffer(data, _ID)
    count = int(words[0])
    ids = torch.from_numpy(words[1 : 1 + count].astype(np.int64))
    return ids, torch.from_numpy(words[1 + count :].view("<f4")).view(count, columns)


def encode_ids(ids: torch.Tensor) -> memoryview:
    """Return row numbers (1-D int64) as the payload of a pull."""
    return memoryview(bytearray(ids.numpy().astype(_ID).tobytes()))


def decode_ids(data: bytearray, rows: int) -> torch.Tensor:
    """Return the row numbers (int64) of a pull from a part of `rows` rows. Raises ProtocolError if they are invalid."""
    if len(data) % _ID.itemsize:
        raise ProtocolError(f"{len(data)} bytes that claim to be row numbers")
    ids = np.frombuffer(data, _ID)
    check_ids(ids, rows)
    return torch.from_numpy(ids.astype(np.int64))


class RowSum:
    """A sum of gradients of few rows: `ids` (int64, ascending) and `values` (fp32, len(ids) by columns).

    Each row is summed in the order of the `add` calls, so the values equal those of the same sum over the whole table.
    """

    def __init__(self, columns: int) -> None:
        self.ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self.values = torch.empty(0, columns, dtype=torch.float32, device="cpu")

    def add(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Add the rows `ids` (ascending, each once). Later calls may change the memory of `values`."""
        if not len(self.ids):
            self.ids, self.values = ids, values
            return
        union = torch.from_numpy(np.union1d(self.ids.numpy(), ids.numpy()))
        if len(union) > len(self.ids):
            grown = torch.zeros(len(union), self.values.shape[1], dtype=torch.float32, device="cpu")
            grown[torch.searchsorted(union, self.ids)] = self.values
            self.ids, self.values = union, grown
        self.values.index_add_(0, torch.searchsorted(union, ids), values)


# ---- The digest of a contribution that is in memory as a tensor: see `core.sums` ----


def digest_of(gradient: torch.Tensor, weight: float = 1.0) -> bytes:
    """Return the digest of a leaf: `gradient` (fp32, 1-D, contiguous, in the host's memory) x `weight`.

    The gradient is not changed. With another weight than 1 the product takes as much memory as the gradient.
    """
    leaf = gradient if weight == 1.0 else gradient * weight
    return leaf_digest(leaf.numpy().data)


# ---- Error feedback: what a lossy codec did not send of a shard is added to the shard's next values ----
#
# Seide et al., 2014, "1-Bit Stochastic Gradient Descent", equations 2 and 3; Karimireddy et al., 2019, "Error Feedback
# Fixes SignSGD", algorithm 2, on gradients instead of updates.

_INNER = "inner."


class ErrorFeedback:
    """Encodes values + residual with `inner`. The new residual is that sum minus what the receiver decodes.

    So the sum of everything decoded is the sum of everything encoded, minus one residual. It serves one shard of one
    replica, of `words` words. Each `encode` is a step: to send a payload again, keep it, or restore the state from
    before it. Codecs that lose nothing or turn large values into infinities (raw, fp16, bf16) raise UsageError. Memory:
    the residual, fp32, and as much of scratch.

    If `inner` refuses the values (a NaN or an infinity, also one that comes from adding the residual), the residual
    stays as it was.
    """

    lossless = False
    carries_nonfinite = False

    def __init__(self, inner: Codec, words: int, scratch: Scratch | None = None) -> None:
        if inner.lossless or inner.carries_nonfinite:
            raise UsageError(f"error feedback is of no use around codec {inner.code}: it sends all that it can")
        self.inner, self.code = inner, inner.code
        self.bytes_for, self.decode, self.decode_add = inner.bytes_for, inner.decode, inner.decode_add
        self._scratch = scratch or Scratch()
        self._residual = torch.zeros(words, dtype=torch.float32, device="cpu")

    def encode(self, values: Tensor, out: memoryview, *, seed: int) -> int:
        values = checked(values)
        if values.numel() != self._residual.numel():
            raise UsageError(f"this codec serves a shard of {self._residual.numel()} words, not of {values.numel()}")
        wanted = torch.add(values, self._residual, out=self._scratch.whole(values.numel()))
        used = self.inner.encode(wanted, out, seed=seed)
        self.inner.decode(out[:used], self._residual)
        torch.sub(wanted, self._residual, out=self._residual)
        return used

    def state(self) -> dict[str, Tensor]:
        """Return `residual` (1-D fp32), and the state of `inner` as `inner.<name>`."""
        inner = self.inner.state() if isinstance(self.inner, Stateful) else {}
        return {"residual": self._residual} | {_INNER + name: tensor for name, tensor in inner.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        require_like(state, self.state())
        self._residual.copy_(state["residual"])
        if isinstance(self.inner, Stateful):
            self.inner.load_state({n.removeprefix(_INNER): t for n, t in state.items() if n.startswith(_INNER)})

    def reset(self) -> None:
        self._residual.zero_()
        if isinstance(self.inner, Stateful):
            self.inner.reset()


def require_like(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Raise UsageError unless `state` has the names, shapes and dtypes of `own`."""
    theirs = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
    ours = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    if theirs != ours:
        raise UsageError(f"this is another codec's state: it has {theirs} where {ours} is needed")
