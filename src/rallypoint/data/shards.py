"""A data set of shards that are read whole, and kept while they are needed."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from rallypoint.data.files import File, StoredFiles
from rallypoint.data.randomness import untouched
from rallypoint.errors import UsageError

log = logging.getLogger("rallypoint")

TOO_OFTEN = 64  # shards that were read again soon after they had been dropped, before a line says so
Transform = Callable[[dict[str, Any]], Any]


class Rows(Protocol):
    """One shard, in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        ...

    def row(self, number: int) -> dict[str, Any]:
        """Return one of its samples, with values of its own."""
        ...


class ShardedDataset(ABC):
    """Samples by position. The shards that were read last are kept, in at most `cache_bytes` (one shard at least).

    For one thread of each process. It pickles without what it keeps. Who inherits sets `_store` and `_files`.
    """

    _store: StoredFiles
    _files: list[File]

    def __init__(self, *, cache_bytes: int, threads: int, transform: Transform | None) -> None:
        for name, number in (("cache_bytes", cache_bytes), ("threads", threads)):
            if number < 1:
                raise UsageError(f"{type(self).__name__}({name}={number}): give 1 or more")
        self._cache_bytes, self._threads, self._transform = cache_bytes, threads, transform
        self._forget()
        self._index([])

    def _index(self, lengths: Iterable[int]) -> None:
        """These are the lengths of the shards."""
        self._lengths = list(lengths)
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)

    @abstractmethod
    def _read(self, shard: int) -> Rows:
        """Read one shard, on any thread."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at these positions, in this order. Each shard is read once at most."""
        of_shard: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            shard = self._shard_of(index)
            of_shard.setdefault(shard, []).append((place, index - int(self._starts[shard])))
        found: list[Any] = [None] * len(indices)
        # A store's client may draw how long it waits before a request is made again: no transform is to notice
        with nullcontext() if self._transform is None else untouched():
            for shard, rows in self._shards(sorted(of_shard)):
                for place, number in of_shard[shard]:
                    found[place] = rows.row(number)
        # In the order of the positions: what a transform draws at random does not depend on which shards were kept
        return found if self._transform is None else [self._transform(row) for row in found]

    def shards_of(self, indices: Sequence[int]) -> list[int]:
        """Return the shards of these positions, ascending."""
        return sorted({self._shard_of(index) for index in indices})

    @abstractmethod
    def ranges(self, shard: int) -> list[tuple[File, int, int]]:
        """Return the ranges of files that a shard is read from; none: it cannot be fetched before it is read."""

    @property
    def fills(self) -> int:
        """How many bytes the cache has room for into which shards can be fetched; 0: there is none."""
        cache = self._store.cache
        remote = cache is not None and any(self._store.here(file) is None for file in self._files)
        return cache.limit if cache is not None and remote else 0

    def fill(self, shard: int) -> bool:
        """Fetch a shard into the cache, if it is not there. For any thread. Raises what the store raises.

        Returns False if the cache does not keep it.
        """
        return all(self._store.fill(*range_) for range_ in self.ranges(shard))

    def _shard_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return int(np.searchsorted(self._starts, index, "right")) - 1

    def shard_lengths(self) -> Sequence[int]:
        """Return how many samples each shard has."""
        return self._lengths

    @abstractmethod
    def fingerprint(self) -> bytes:
        """Return what the workers of a job compare beside the lengths: a digest of what the files tell of themselves.

        It does not depend on where the files lie, and no sample is read for it.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_kept", "_dropped", "_again")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._kept: Recent[int, Rows] = Recent(self._cache_bytes)
        self._dropped: deque[int] = deque(maxlen=64)
        self._again = 0

    def _shards(self, shards: list[int]) -> Iterable[tuple[int, Rows]]:
        """These shards, those that are kept first; some others at once are read, by threads."""
        missing = []
        for shard in shards:
            if (kept := self._kept.get(shard)) is None:
                missing.append(shard)
            else:
                yield shard, kept
        if len(missing) < 2 or self._threads == 1:
            yield from ((shard, self._keep(shard, self._read(shard))) for shard in missing)
            return
        with ThreadPoolExecutor(min(self._threads, len(missing)), "reading shards") as pool:
            for first in range(0, len(missing), self._threads):  # no more than that are in memory beside the kept ones
                some = missing[first : first + self._threads]
                for shard, rows in zip(some, pool.map(self._read, some), strict=True):
                    yield shard, self._keep(shard, rows)

    def _keep(self, shard: int, rows: Rows) -> Rows:
        again = shard in self._dropped
        self._again += again
        if again and self._again == TOO_OFTEN:
            log.warning(
                "shards of the data set are read again soon after they were dropped, because those that are needed at "
                'a time take more than cache_bytes=%d in this process: reading.order="windowed", fewer '
                "reading.mixed_shards, or a larger cache_bytes avoid that (%d bytes are kept of %d shards)",
                self._cache_bytes, self._kept.size, len(self._kept),
            )  # fmt: skip
        self._dropped.extend(self._kept.put(shard, rows, rows.nbytes))
        return rows


K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps the values that were used last, as long as their sizes together are at most `limit`.

    The newest one is kept, whatever its size. For one thread. Pickle it empty: each process has its own.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def size(self) -> int:
        """The size of all that is kept."""
        return self._size

    def get(self, key: K) -> V | None:
        """Return the value, which is the newest then; None if it is not kept."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int) -> list[K]:
        """Keep this value, which was not kept, as the newest. Returns what is no longer kept."""
        self._values[key] = value, size
        self._size += size
        dropped = []
        while self._size > self._limit and len(self._values) > 1:
            oldest, (_, freed) = self._values.popitem(last=False)
            self._size -= freed
            dropped.append(oldest)
        return dropped
