"""What a simulated job computes: names instead of tensors, so that the least mix-up changes the last one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from rallypoint.config import JobConfig
from rallypoint.core.clip import clip_scale, total_norm
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Layout, Shard

Content = int
GARBAGE: Content = -1


def combine(*parts: int) -> Content:
    """A name for what these make together (hashes of tuples of ints are the same in every process)."""
    return hash(parts) & 0x7FFF_FFFF_FFFF_FFFF


@dataclass(frozen=True)
class SimulatedJob:
    """A job of `steps` steps and `replicas` replicas over `shards` shards, the last of which are buffers.

    With `clip` servers decide together; with `skip` buffers wait too, and a step that is not finite changes nothing.
    """

    shards: int = 6
    buffers: int = 1
    replicas: int = 4
    steps: int = 12
    clip: float | None = None
    skip: bool = False
    compute_s: float = 0.2  # a replica's, on a worker of speed 1
    buffer_shards: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffer_shards", frozenset(range(self.shards - self.buffers, self.shards)))

    def record(self) -> JobRecord:
        """The record that workers propose."""
        config = JobConfig(
            replicas=self.replicas, steps=self.steps, clip=self.clip, batch=8,
            nonfinite="skip" if self.skip else "stop",
        )  # fmt: skip
        shards = tuple(Shard(i, -1 if i in self.buffer_shards else 0, 16 * i, 16 * i + 16) for i in range(self.shards))
        return JobRecord(msgspec.to_builtins(config), Layout((), shards, 16 * self.shards, "simulated"))

    def expected(self, shard: int) -> int:
        """Contributions of a step to this shard."""
        return 1 if shard in self.buffer_shards else self.replicas

    def first(self, shard: int, worker: str = "") -> Content:
        """Version 0; the same whichever worker brings it."""
        return combine(7, shard)

    def gradient(self, shard: int, step: int, replica: int, model: Iterable[Content]) -> Content:
        """What `replica` contributes at `step` when the model is `model`."""
        return combine(shard, step, replica, *model)

    def is_finite(self, step: int, replica: int) -> bool:
        """Is this replica's loss a number at `step`?"""
        return not self.skip or (step * 5 + replica) % 13 != 4

    def norm(self, shard: int, finished: Content) -> float:
        """The 2-norm of a shard's mean gradient."""
        return math.inf if self.skip and shard == 0 and finished % 7 == 0 else finished % 1009 / 1000

    def scaled(self, finished: Content, scale: float) -> Content:
        """A gradient after clipping."""
        return finished if scale == 1.0 else combine(finished, int(scale * 2**40))

    def update(self, master: Content, finished: Content, step: int) -> Content:
        """The optimizer."""
        return combine(master, finished, step, 99)

    def undisturbed(self) -> list[Content]:
        """Every shard at the last version, computed without any cluster."""
        return self.trajectory[-1]

    @cached_property
    def trajectory(self) -> list[list[Content]]:
        """Every shard at every version, computed without any cluster."""
        models = [[self.first(shard) for shard in range(self.shards)]]
        for step in range(self.steps):
            finished = [self._finished(shard, step, models[-1]) for shard in range(self.shards)]
            scale = self._scale(step, finished)
            models.append([
                self._next(shard, master, finished[shard], step, scale) for shard, master in enumerate(models[-1])
            ])  # fmt: skip
        return models

    def _finished(self, shard: int, step: int, model: Iterable[Content]) -> Content:
        total = self.gradient(shard, step, 0, model)
        for replica in range(1, self.expected(shard)):
            total = combine(total, self.gradient(shard, step, replica, model))
        return combine(total, self.expected(shard))

    def _scale(self, step: int, finished: list[Content]) -> float | None:
        norms = [self.norm(shard, finished[shard]) for shard in range(self.shards) if shard not in self.buffer_shards]
        losses = all(self.is_finite(step, replica) for replica in range(self.replicas))
        whole = losses and all(map(math.isfinite, norms))
        return clip_scale(total_norm(norms), self.clip) if whole or not self.skip else None

    def _next(self, shard: int, master: Content, finished: Content, step: int, scale: float | None) -> Content:
        decided = self.skip or shard not in self.buffer_shards
        if decided and scale is None:
            return master
        return self.update(master, self.scaled(finished, scale if decided and scale is not None else 1.0), step)
