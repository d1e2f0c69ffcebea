"""Questions about all shards that are asked at every arrival, answered without a scan of all shards each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain


class Lowest(list[int]):
    """A list of `size` numbers (all `number` at first) that knows its lowest. Numbers can only rise.

    It counts how many there are of each number, which is cheap where many are equal, as versions are.
    """

    def __init__(self, size: int, number: int) -> None:
        super().__init__([number] * size)
        self._counts = Counter(self)
        self.lowest = number  # the initial one if `size` is 0

    def raise_to(self, index: int, number: int) -> None:
        """Raise the number at `index` to `number`; do nothing if it is as high already."""
        before = self[index]
        if number <= before:
            return
        self[index] = number
        self._counts[number] += 1
        self._counts[before] -= 1
        if not self._counts[before]:
            del self._counts[before]
            if before == self.lowest:
                self.lowest = min(self._counts)


class Unanimity:
    """Checks a condition for all of `size` indices, beginning with the index for which it failed the last time.

    While that index still fails, no other is checked: waiting for n shards takes about 3n checks in all instead of n
    at each arrival. The result never depends on an old check: True means that all indices were checked in this call.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._obstacle = 0

    def holds(self, of: Callable[[int], bool]) -> bool:
        """True if `of(index)` is true for every index in 0..size-1."""
        for index in chain(range(self._obstacle, self._size), range(self._obstacle)):
            if not of(index):
                self._obstacle = index
                return False
        return True
