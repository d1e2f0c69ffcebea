"""What every codec promises."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from rallypoint.errors import RallypointError


class NonFinitePayload(RallypointError):
    """The values to send hold a NaN or an infinity, and this codec's format cannot carry one."""


class Codec(Protocol):
    """Writes one shard's values as bytes and reads them back.

    Values are 1-D contiguous fp32 CPU tensors; what is not raises UsageError. An instance works through scratch buffers
    and belongs to one thread at a time. Stateless instances serve shards of any size; those that are `Stateful` belong
    to one shard of one replica.

    Attributes:
        code: the wire format's number in the frame header; 0 is raw fp32.
        lossless: does decoding give back the very bytes that were encoded?
        carries_nonfinite: do NaN and infinities arrive as such? If not, `encode` raises NonFinitePayload on them.
    """

    @property
    def code(self) -> int: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def carries_nonfinite(self) -> bool: ...

    def bytes_for(self, words: int) -> int:
        """Bytes that `words` words take: exactly, or at most where the format's size depends on the values."""

    def encode(self, values: Tensor, out: memoryview, *, seed: int) -> int:
        """Write `values` (not modified) to the beginning of `out`; the bytes used are returned.

        Every random choice comes from `seed`, a number the caller derives from (job seed, step, replica, shard): the
        same values, state and seed give the same bytes. `out` must start on a 4-byte boundary and have room for
        `bytes_for`, else UsageError. NonFinitePayload on NaN or infinity where the format cannot carry them; the
        codec's state is then what it was, and what `out` holds is anything.
        """

    def decode(self, payload: memoryview, into: Tensor) -> None:
        """Overwrite `into` with what `payload` says. ProtocolError when the payload is not one for `into`'s size.

        Nothing in a payload is trusted: lengths, counts, indices and scales are checked before `into` is touched. A
        payload that is read-only or does not start on a 4-byte boundary is copied first.
        """

    def decode_add(self, payload: memoryview, into: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times what `payload` says to `into`.

        The same bytes as decoding, multiplying by `weight` and adding, each rounded by itself. Two exceptions: sparse
        formats add nothing where they sent nothing (so -0.0 stays -0.0), and low-rank ones add inside the product.
        """


@runtime_checkable
class Stateful(Protocol):
    """A codec with state: it keeps something of a shard from step to step (a residual, momentum, factors)."""

    def state(self) -> dict[str, Tensor]:
        """The state by name; views, not copies."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over (copy) what `state` returned elsewhere. UsageError when names or shapes are not this codec's."""

    def reset(self) -> None:
        """Forget: as after construction."""
