"""The sum in progress of one dense shard."""

from __future__ import annotations

import torch

from rallypoint.net.pool import Buffer


class GradientSum:
    """The first contribution's buffer becomes the sum. Later ones are added to it and released."""

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
        """The sum as a view of its buffer: fp32, shape (words,)."""
        return self.buffer.tensor[: self._words]

    def take(self, payload: Buffer, weight: float) -> None:
        """Start the sum with the first contribution, times its weight. Its buffer now belongs to the sum."""
        self._buffer = payload
        if weight != 1.0:
            self.values.mul_(weight)

    def add(self, payload: Buffer, weight: float) -> None:
        """Add a contribution, times its weight. Multiplying first gives the same rounding for any cut into shards."""
        values = payload.tensor[: self._words]
        if weight != 1.0:
            values.mul_(weight)
        self.values.add_(values)
        payload.release()

    def mean(self, total_weight: float) -> None:
        """Multiply the sum by 1 / `total_weight`: the weighted mean."""
        if total_weight != 1.0:
            self.values.mul_(1.0 / total_weight)

    def norm(self) -> float:
        """The 2-norm of the sum (after `mean`: of the mean)."""
        return float(torch.linalg.vector_norm(self.values))

    def leave(self) -> Buffer:
        """Return the finished gradient's buffer. The caller must release it."""
        buffer, self._buffer = self.buffer, None
        return buffer

    def abandon(self) -> None:
        """Discard the sum and release its buffer."""
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None
