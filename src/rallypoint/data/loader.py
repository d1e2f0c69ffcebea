"""Micro-batches of a map-style dataset: the samples that (step, replica, micro) names, collated, on a device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from rallypoint.config import JobConfig
from rallypoint.core.order import SampleOrder, derive_seed
from rallypoint.errors import DataError


class MapDataset(Protocol):
    """What ``torch.utils.data.Dataset`` calls map-style. `__getitems__(indices)`, if it has one, is used instead."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MicroBatches:
    """The data of one job, by position (I6). DataError when the dataset is empty."""

    def __init__(self, dataset: MapDataset, config: JobConfig, device: torch.device) -> None:
        if len(dataset) == 0:
            raise DataError("the dataset is empty: there is nothing to train on")
        self._dataset, self._config, self._device = dataset, config, device
        self._micro = config.batch // config.accumulate
        self._order = SampleOrder(
            seed=config.seed, samples=len(dataset), replicas=config.replicas, batch=config.batch
        )

    def load(self, step: int, replica: int, micro: int) -> Any:
        """The collated samples of one micro-batch; random augmentation in the dataset is seeded by position too."""
        indices = self._order.samples(step, replica)[micro * self._micro : (micro + 1) * self._micro]
        seed_everything(derive_seed(self._config.seed, "data", step, replica, micro))
        return to_device(default_collate(self._fetch(indices)), self._device)

    def _fetch(self, indices: Sequence[int]) -> list[Any]:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            return list(fetch_many(list(indices)))
        return [self._dataset[index] for index in indices]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's (all devices') global generators."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`; lists, tuples and dicts are walked."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
