"""One shard as its server holds it: the machine that decides, and the tensors that its effects change."""

from __future__ import annotations

import torch

from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.shard import ShardMachine
from rallypoint.net.pool import Buffer
from rallypoint.optim.flat import ShardOptimizer

VERSIONS_KEPT = 2  # I5: a worker can rewind to the step in progress


class OwnedShard:
    """Master weights, optimizer state, the sum in progress, and the wire copies of the last two versions."""

    def __init__(self, shard: Shard, config: JobConfig) -> None:
        is_buffers = shard.role == "buffers"
        self.shard = shard
        self.machine = ShardMachine(
            policy=config.sync,
            expected=1 if is_buffers else config.replicas,
            decides=config.nonfinite == "skip" if is_buffers else config.decides,
        )
        self._optimizer = None if is_buffers else ShardOptimizer(config, shard.group, shard.words)
        self.master = torch.zeros(shard.words) if self._optimizer is None else self._optimizer.master
        self.wire: dict[int, Buffer] = {}
        self._sum: Buffer | None = None

    @property
    def measured(self) -> bool:
        """Does this shard's gradient count in the global norm?"""
        return self._optimizer is not None

    @property
    def gradient(self) -> torch.Tensor:
        """The sum in progress, a view of its buffer."""
        assert self._sum is not None
        return self._sum.tensor[: self.shard.words]

    def install(self, payload: Buffer) -> None:
        """Version 0 has come: its buffer becomes the wire copy."""
        self.master.copy_(payload.tensor[: self.shard.words])
        self._keep(0, payload)

    def take(self, payload: Buffer, weight: float) -> None:
        """The first contribution's buffer becomes the sum."""
        self._sum = payload
        if weight != 1.0:
            self.gradient.mul_(weight)

    def add(self, payload: Buffer, weight: float) -> None:
        """Add a contribution. Times the weight first: each rounding is then the same however shards are cut."""
        values = payload.tensor[: self.shard.words]
        if weight != 1.0:
            values.mul_(weight)
        self.gradient.add_(values)
        payload.release()

    def mean(self, total_weight: float) -> None:
        """Turn the sum into the weighted mean."""
        if total_weight != 1.0:
            self.gradient.mul_(1.0 / total_weight)

    def norm(self) -> float:
        """The 2-norm of the finished gradient."""
        return float(torch.linalg.vector_norm(self.gradient))

    def apply(self, step: int, scale: float | None) -> None:
        """Update the master with the finished gradient; its buffer then becomes the new version's wire copy."""
        assert self._sum is not None
        if scale is not None and self._optimizer is None:
            self.master.copy_(self.gradient)
        elif scale is not None and self._optimizer is not None:
            if scale != 1.0:
                self.gradient.mul_(scale)
            self._optimizer.apply(self.gradient, step)
        self.gradient.copy_(self.master)
        self._keep(step + 1, self._sum)
        self._sum = None

    def _keep(self, version: int, buffer: Buffer) -> None:
        self.wire[version] = buffer
        if (old := self.wire.pop(version - VERSIONS_KEPT, None)) is not None:
            old.release()
