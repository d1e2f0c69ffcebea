"""Questions about all shards that are asked at every arrival, answered without looking at all of them each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain


class Lowest:
    """Numbers, one per shard, the lowest of which is known at any time.

    Cheap where many are equal, as versions are: what is kept beside them is how many there are of each.
    """

    def __init__(self, size: int, number: int) -> None:
        self._numbers = [number] * size
        self._counts = Counter(self._numbers)
        self._lowest = number

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]

    def raise_to(self, index: int, number: int) -> None:
        """The number at `index` becomes this one, unless it is as high already."""
        before = self._numbers[index]
        if number <= before:
            return
        self._numbers[index] = number
        self._counts[number] += 1
        self._counts[before] -= 1
        if not self._counts[before]:
            del self._counts[before]
            if before == self._lowest:
                self._lowest = min(self._counts)

    @property
    def lowest(self) -> int:
        """The lowest of all; the number that they began with where there are none."""
        return self._lowest


class Unanimity:
    """Whether something holds of all shards: asks first about the one of which it did not hold the last time.

    As long as that one is the obstacle the others are not looked at, so that waiting for n shards to come takes about
    3n looks in all instead of n at each arrival. Nothing is remembered that could be out of date: True follows only
    when all have been looked at.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._obstacle = 0

    def holds(self, of: Callable[[int], bool]) -> bool:
        """Does it hold of every index?"""
        for index in chain(range(self._obstacle, self._size), range(self._obstacle)):
            if not of(index):
                self._obstacle = index
                return False
        return True
