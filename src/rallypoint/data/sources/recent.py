"""The values that were used last, up to a bound."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

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

    def __contains__(self, key: K) -> bool:
        return key in self._values

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
