"""The sum in progress of one dense shard."""

from __future__ import annotations

import torch

from rallypoint.net.pool import Buffer


class GradientSum:
    """The first contribution's buffer becomes the sum; the others are added to it and go back to their pool."""

    def __init__(self, words: int) -> None:
        self._words = words
        self._buffer: Buffer | None = None

    @property
    def buffer(self) -> Buffer:
        """The sum's buffer."""
        assert self._buffer is not None
        return self._buffer

    @property
    def values(self) -> torch.Tensor:
        """The sum, a view of its buffer: fp32, a shard's words."""
        return self.buffer.tensor[: self._words]

    def take(self, payload: Buffer, weight: float) -> None:
        """The first contribution, times its weight."""
        self._buffer = payload
        if weight != 1.0:
            self.values.mul_(weight)

    def add(self, payload: Buffer, weight: float) -> None:
        """Add a contribution. Times the weight first: each rounding is then the same however shards are cut."""
        values = payload.tensor[: self._words]
        if weight != 1.0:
            values.mul_(weight)
        self.values.add_(values)
        payload.release()

    def mean(self, total_weight: float) -> None:
        """Turn the sum into the weighted mean."""
        if total_weight != 1.0:
            self.values.mul_(1.0 / total_weight)

    def norm(self) -> float:
        """The 2-norm of what is in it."""
        return float(torch.linalg.vector_norm(self.values))

    def leave(self) -> Buffer:
        """The finished gradient; whoever takes it releases the buffer."""
        buffer, self._buffer = self.buffer, None
        return buffer

    def abandon(self) -> None:
        """Forget the sum."""
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None
