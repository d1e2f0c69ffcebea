"""What an aligned worker knows of versions: the newest of each shard, and the ones in the slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain

from rallypoint.core.cadence import Cadence
from rallypoint.core.worker.slots import Slot, Slots

# Questions about all shards that are asked at every arrival, answered without a scan of all shards each time.


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


class Versions:
    """The versions of each shard. They count the job's rounds; `cadence` converts a shard's own versions to them.

    Attributes:
        newest: the newest version of each shard known to exist; -1 while none is known.
        whole: the newest of these that a worker can start from; -1 while none is known.
        held: the version in each slot that is LANDING or LANDED; without meaning for other slots.
        asked: the version that was fetched and has not come; -1 if none.
    """

    def __init__(self, slots: Slots, cadence: Cadence) -> None:
        self._slots, self._cadence = slots, cadence
        self.newest = self.whole = Lowest(0, -1)
        self.held: list[int] = []
        self.asked: list[int] = []
        self.forget_all()

    def forget_all(self) -> None:
        """Drop everything: a new generation begins."""
        self.unknown()
        self.begin_step()

    def unknown(self) -> None:
        """Drop what is known of existing versions: this worker has not followed the servers for a while."""
        self.newest, self.whole = Lowest(len(self._slots), -1), Lowest(len(self._slots), -1)

    def begin_step(self) -> None:
        """Drop what is known of the slots: the model now holds what was in them."""
        self.held, self.asked = [-1] * len(self._slots), [-1] * len(self._slots)

    def exists(self, shard: int, version: int, *, whole: bool) -> None:
        """Note that a server has this version of `shard`; `whole`: a worker can start from it."""
        self.newest.raise_to(shard, version)
        self.whole.raise_to(shard, version if whole else -1)
        if self.asked[shard] == version:
            self.asked[shard] = -1

    def has_room(self, shard: int, right: int) -> bool:
        """True if version `right` can land: the slot is not in use, or holds another version."""
        return self._slots.has_room(shard) or (self._slots[shard] is Slot.LANDED and self.held[shard] != right)

    def landed(self, shard: int, target: int) -> bool:
        """True if the slot holds the shard's version of `target`."""
        return self._slots[shard] is Slot.LANDED and self.held[shard] == self._cadence.next_due(shard, target)

    def wanted(self, shard: int, target: int) -> bool:
        """True if the shard's version of `target` exists, is not here and was not fetched."""
        right = self._cadence.next_due(shard, target)
        return self.newest[shard] >= right and self.asked[shard] != right and self.has_room(shard, right)

    def validate(self) -> None:
        """Raise AssertionError if a slot holds no known version, or a fetch is for a version not known to exist."""
        whole, newest = self.whole, self.newest
        for shard, slot in enumerate(self._slots):
            known, asked = newest[shard], self.asked[shard]
            if slot is Slot.LANDING or slot is Slot.LANDED:
                assert self.held[shard] >= 0, f"slot {shard} is {slot}, but of no version"
            assert whole[shard] <= known, f"shard {shard}: whole {whole[shard]} is above newest {known}"
            assert asked <= known or known < 0, f"shard {shard}: version {asked} was fetched"
