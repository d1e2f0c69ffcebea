"""Map-style data sets: what one is, and its samples by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch.utils.data import IterableDataset

from rallypoint.errors import DataError


class NotASample(Exception):
    """An error of no sample: to read it again, or to leave it out, is of no use."""


class MapDataset(Protocol):
    """What ``torch.utils.data.Dataset`` calls map-style. If it has `__getitems__(indices)`, that is used instead."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Sharded(Protocol):
    """A map-style data set that is read in shards (files, row groups), one after the other.

    Its samples 0 to ``shard_lengths()[0] - 1`` are those of the first shard, and so on. Example::

        class Lines:
            def shard_lengths(self):
                return [len(lines) for lines in self.files]
    """

    def shard_lengths(self) -> Sequence[int]:
        """Return how many samples each shard has."""
        ...


def is_sharded(dataset: object) -> TypeGuard[Sharded]:
    """True if the data set tells its shards. An attribute of that name is not enough: it may be anything."""
    return isinstance(dataset, Sharded) and callable(dataset.shard_lengths)


def shard_lengths(dataset: object) -> tuple[int, ...]:
    """Return the lengths of a data set's shards. Raises DataError if it does not tell them, or tells wrong ones."""
    kind = type(dataset).__qualname__
    if not is_sharded(dataset):
        raise DataError(
            f'reading.order="windowed" shuffles the shards of a data set, and a {kind} does not tell them: give '
            "rp.Parquet, rp.TokenFiles, rp.WebDataset or a data set with shard_lengths(), or leave it out (a "
            "transform in a data set around one of them hides them: give it as transform= or collate_fn=)"
        )
    lengths = tuple(int(length) for length in dataset.shard_lengths())
    total = len(dataset)  # type: ignore[arg-type]
    if min(lengths, default=-1) < 0 or sum(lengths) != total:
        raise DataError(
            f"shard_lengths() of a {kind} must be numbers of samples, of which the sum is len(dataset): the sum is "
            f"{sum(lengths)}, the length {total}"
        )
    return lengths


def check_dataset(dataset: object) -> None:
    """Raise DataError when this is no map-style data set, or an empty one. The message says what to give instead."""
    if isinstance(dataset, IterableDataset):
        raise DataError("an IterableDataset was given where only a map-style data set works: give rp.Stream(dataset)")
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
