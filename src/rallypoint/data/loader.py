"""Micro-batches of a map-style data set: the samples of (step, replica, micro), collated, on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from rallypoint.config import JobConfig
from rallypoint.core.order import SampleOrder, derive_seed
from rallypoint.data.randomness import seed_everything
from rallypoint.errors import DataError

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """What ``torch.utils.data.Dataset`` calls map-style. If it has `__getitems__(indices)`, that is used instead."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MicroBatches:
    """The data of one job, by position (I6).

    `collate` makes a batch of a list of samples; None: torch's ``default_collate``. `part` says which part, of how
    many, of each micro-batch is loaded. Raises DataError when the data set is empty or not map-style, or when a
    micro-batch cannot be cut into so many equal parts.
    """

    def __init__(
        self, dataset: MapDataset, config: JobConfig, device: torch.device, collate: Collate | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        check_dataset(dataset)
        self._dataset, self._config, self._device, self._collate = dataset, config, device, collate
        self._micro, self._part = config.batch // config.accumulate, part
        self._parted = part[:1] if part[1] > 1 else ()  # ranks that have the same part draw the same random numbers
        if self._micro % part[1]:
            raise DataError(
                f"a micro-batch of {self._micro} samples cannot be split over {part[1]} ranks: make batch / accumulate "
                "a multiple of that"
            )
        self._order = SampleOrder(
            seed=config.seed, samples=len(dataset), replicas=config.replicas, batch=config.batch
        )

    def load(self, step: int, replica: int, micro: int) -> Any:
        """Return the collated samples of one micro-batch.

        Random augmentation in the data set is seeded by position too.

        Raises DataError when ``default_collate`` cannot make a batch of the samples.
        """
        return self.batch_of(self.fetched(step, replica, micro))

    def indices(self, step: int, replica: int, micro: int) -> Sequence[int]:
        """Return the positions of a micro-batch's samples in the data set."""
        part, parts = self._part
        of_micro = self._order.samples(step, replica)[micro * self._micro : (micro + 1) * self._micro]
        return of_micro[part * self._micro // parts : (part + 1) * self._micro // parts]

    def fetched(self, step: int, replica: int, micro: int) -> list[Any]:
        """Return a micro-batch's samples, not collated."""
        seed_everything(derive_seed(self._config.seed, "data", step, replica, micro, *self._parted))
        return fetch(self._dataset, self.indices(step, replica, micro))

    def batch_of(self, samples: list[Any]) -> Any:
        """Return these samples, collated, on the device. Raises DataError as `load`."""
        return to_device(self._collated(samples), self._device)

    def compute_seed(self, step: int, replica: int, micro: int) -> int:
        """Return the seed of a micro-batch's forward pass."""
        return derive_seed(self._config.seed, "compute", step, replica, micro, *self._parted)

    def _collated(self, samples: list[Any]) -> Any:
        if self._collate is not None:
            return self._collate(samples)
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"these samples cannot be made a batch of ({str(error).splitlines()[0]}): return tensors of one shape, "
                "numbers, or lists, tuples and dicts of them; or give job.train(..., collate_fn=...), as for a "
                "DataLoader"
            ) from None


def check_dataset(dataset: object) -> None:
    """Raise DataError when this is no map-style data set, or an empty one. The message says what to give instead."""
    if isinstance(dataset, DataLoader):
        raise DataError(
            "a DataLoader was given as the data set: give its data set (loader.dataset). Order and batches are the "
            "job's: batch=, seed=, collate_fn="
        )
    if isinstance(dataset, IterableDataset):
        raise DataError(
            "an IterableDataset was given: which samples a replica gets at a step is computed from their positions, so "
            "give a map-style data set (__len__ and __getitem__)"
        )
    kind = type(dataset)
    if isinstance(dataset, Mapping) or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise DataError(
            f"a {kind.__qualname__} was given as the data set: give a map-style one, with __len__() and "
            "__getitem__(index) for 0 to length - 1, such as a torch.utils.data.Dataset or a list of samples"
        )
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise DataError("the dataset is empty: there is nothing to train on")


def fetch(dataset: MapDataset, indices: Sequence[int]) -> list[Any]:
    """Return the samples at these positions, in this order."""
    fetch_many = getattr(dataset, "__getitems__", None)
    if fetch_many is not None:
        return list(fetch_many(list(indices)))
    return [dataset[index] for index in indices]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on `device`, also those in nested lists, tuples and dicts."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
