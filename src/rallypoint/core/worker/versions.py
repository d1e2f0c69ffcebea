"""Which versions exist of each shard, and which of them are in the slots: what an aligned worker knows."""

from __future__ import annotations

from rallypoint.core.cadence import Cadence
from rallypoint.core.worker.scan import Lowest
from rallypoint.core.worker.slots import Slot, Slots


class Versions:
    """Versions are the job's here. A shard's own version, which frames carry, goes by `cadence`.

    `newest`: the newest version of each shard known to exist, -1 when nothing is known. `whole`: the newest of them
    that a worker can start from. `held`: the version in a slot that is landing or landed, else of no meaning. `asked`:
    the version that was fetched and has not come, else -1.
    """

    def __init__(self, slots: Slots, cadence: Cadence) -> None:
        self._slots, self._cadence = slots, cadence
        self.newest = self.whole = Lowest(0, -1)
        self.held: list[int] = []
        self.asked: list[int] = []
        self.forget_all()

    def forget_all(self) -> None:
        """A new generation: nothing is known."""
        self.unknown()
        self.begin_step()

    def unknown(self) -> None:
        """This worker has not followed for a while: it does not know which versions exist."""
        self.newest, self.whole = Lowest(len(self._slots), -1), Lowest(len(self._slots), -1)

    def begin_step(self) -> None:
        """The model holds what was in the slots."""
        self.held, self.asked = [-1] * len(self._slots), [-1] * len(self._slots)

    def exists(self, shard: int, version: int, *, whole: bool) -> None:
        """A version has come, or begun to."""
        self.newest.raise_to(shard, version)
        self.whole.raise_to(shard, version if whole else -1)
        if self.asked[shard] == version:
            self.asked[shard] = -1

    def right(self, shard: int, step: int) -> int:
        """The version of this shard that belongs to a step."""
        return self._cadence.next_due(shard, step)

    def has_room(self, shard: int, right: int) -> bool:
        """Can `right` land? Not where a version is landing, or where it is already."""
        return self._slots.has_room(shard) or (self._slots[shard] is Slot.LANDED and self.held[shard] != right)

    def landed(self, shard: int, target: int) -> bool:
        """Is what belongs to the target in its slot?"""
        return self._slots[shard] is Slot.LANDED and self.held[shard] == self.right(shard, target)

    def wanted(self, shard: int, target: int) -> bool:
        """Does the shard's version for the target exist, and is neither here nor on its way?"""
        right = self.right(shard, target)
        return self.newest[shard] >= right and self.asked[shard] != right and self.has_room(shard, right)

    def validate(self) -> None:
        """AssertionError if a slot holds, or a fetch is for, a version that is not known to exist."""
        whole, newest = self.whole, self.newest
        for shard, slot in enumerate(self._slots):
            known, asked = newest[shard], self.asked[shard]
            if slot is Slot.LANDING or slot is Slot.LANDED:
                assert self.held[shard] >= 0, f"slot {shard} is {slot}, but of no version"
            assert whole[shard] <= known, f"shard {shard}: whole {whole[shard]} is above newest {known}"
            assert asked <= known or known < 0, f"shard {shard}: version {asked} was fetched"
