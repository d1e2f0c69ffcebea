"""What a simulated job computes: names instead of tensors, so that the least mix-up changes the last one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from rallypoint.config import JobConfig
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Layout, Shard

Content = int
GARBAGE: Content = -1


def combine(*parts: int) -> Content:
    """A name for what these make together (hashes of tuples of ints are the same in every process)."""
    return hash(parts) & 0x7FFF_FFFF_FFFF_FFFF


@dataclass(frozen=True)
class SimulatedJob:
    """A job of `steps` steps and `replicas` replicas over `shards` shards, the last of which are buffers."""

    shards: int = 6
    buffers: int = 1
    replicas: int = 4
    steps: int = 12
    clip: float | None = None
    compute_s: float = 0.2  # a replica's, on a worker of speed 1
    buffer_shards: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffer_shards", frozenset(range(self.shards - self.buffers, self.shards)))

    def record(self) -> JobRecord:
        """The record that workers propose."""
        config = JobConfig(replicas=self.replicas, steps=self.steps, clip=self.clip, batch=8)
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

    def update(self, master: Content, finished: Content, step: int) -> Content:
        """The optimizer."""
        return combine(master, finished, step, 99)

    def undisturbed(self) -> list[Content]:
        """Every shard at the last version, computed without any cluster."""
        model = [self.first(shard) for shard in range(self.shards)]
        for step in range(self.steps):
            new = []
            for shard in range(self.shards):
                total = 0
                for replica in range(self.expected(shard)):
                    gradient = self.gradient(shard, step, replica, model)
                    total = gradient if replica == 0 else combine(total, gradient)
                new.append(self.update(model[shard], combine(total, self.expected(shard)), step))
            model = new
        return model
