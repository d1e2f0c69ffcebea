"""The interface of every codec."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from rallypoint.errors import RallypointError


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
