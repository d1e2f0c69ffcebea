"""Which samples of a data set one replica's loader reads, where a framework has the loop."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from rallypoint.core.order import derive_seed


class ReplicaSampler(Sampler[int]):
    """The part of each global batch that one replica computes, in the order of one seed.

    A global batch is `replicas` batches of `batch` samples; replica r reads the r-th of them. So one process with
    ``replicas * batch`` samples a step, or with `replicas` accumulated micro-batches, computes the same mean. Samples
    that fill no global batch are left out of an epoch.

    Attributes:
        replica: which replica reads.
        epoch: the next iteration is this epoch's.
        skip: samples that the next iteration leaves out at its start: those before a process was started again.
    """

    def __init__(self, length: int, *, replicas: int, batch: int, shuffled: bool, seed: int) -> None:
        self._length, self._replicas, self._batch = length, replicas, batch
        self._shuffled, self._seed = shuffled, seed
        self.replica = self.epoch = self.skip = 0

    @property
    def batches(self) -> int:
        """Batches of this replica in an epoch."""
        return self._length // (self._replicas * self._batch)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch's."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches * self._batch

    def __iter__(self) -> Iterator[int]:
        order = range(self._length) if not self._shuffled else torch.randperm(
            self._length, generator=torch.Generator("cpu").manual_seed(derive_seed(self._seed, "epoch", self.epoch)),
            dtype=torch.int64, device="cpu",
        ).tolist()  # fmt: skip
        skip, self.skip = self.skip, 0
        mine = [
            order[at]
            for step in range(self.batches)
            for at in range((step * self._replicas + self.replica) * self._batch,
                            (step * self._replicas + self.replica + 1) * self._batch)
        ]  # fmt: skip
        return iter(mine[skip:])
