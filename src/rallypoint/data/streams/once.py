"""Items that come only once: each process reads its own, and keeps those of the last steps."""

from __future__ import annotations

import bisect
import heapq
import os
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

from rallypoint.config import JobConfig
from rallypoint.core.streams.order import StreamOrder
from rallypoint.data.dataset import NotASample
from rallypoint.data.streams.opening import PartIterator
from rallypoint.data.streams.reader import EndOfStream, own
from rallypoint.data.streams.stream import STEPS_KEPT, PartItems, Stream
from rallypoint.errors import DataError


class StreamOver(DataError):
    """A stream that comes only once has no full batch for a replica any more: whoever had its samples is gone."""


class OnceItems(PartItems):
    """What this process reads of a stream that comes only once.

    Numbers are places; which item comes to a place is decided when it is first asked for.
    Asked for again, the place has the same item (I5: a step that is computed again here), as long as it is kept. An
    item of a place that was read ahead and never computed goes to a later place. Main thread only.

    Attributes:
        key: a random number of this process.
        read: how many items it has read.
        in_batch: how many samples are in the micro-batch that is computed now.
    """

    def __init__(self, stream: Stream, order: StreamOrder, config: JobConfig) -> None:
        self._stream, self._order, self._config = stream, order, config
        self.key, self.read, self.in_batch = 2 + secrets.randbelow(1 << 30), 0, 0
        self._parts: dict[int, _Part] = {}
        self._process = os.getpid()

    def _taken(self, part: int, numbers: Sequence[int]) -> list[Any]:
        items = self._part(part).take(numbers)
        self._count()
        return items

    def name_of(self, index: int) -> str:
        """Return what to call an item in a sentence."""
        place, part = divmod(index, self._stream.parts)
        return f"the item at place {place} of part {part} of the stream"

    def continues(self, step: int, replica: int) -> bool:
        """True if there is a full batch for the replica at this step, which is read now."""
        part, first, stop = self._order.items(step, replica)
        there = self._part(part).has(range(first, stop))
        self._count()
        return there

    def computes(self, indices: Sequence[int], left_out: int) -> None:
        """These places are computed now, without so many that raise errors: their items go to no other place."""
        self.in_batch = len(indices) - left_out
        for index in indices:
            self._part(index % self._stream.parts).computed.add(index // self._stream.parts)

    def _count(self) -> None:
        self.read = sum(part.read for part in self._parts.values())

    def _part(self, part: int) -> _Part:
        if self._process != os.getpid():
            raise NotASample("a stream that comes only once is read by the worker's own process")
        if part not in self._parts:
            iterator = PartIterator(self._stream.source, part, self._stream.parts, epoch=0, seed=self._config.seed)
            self._parts[part] = _Part(part, iterator, keep=STEPS_KEPT * self._order.stride)
        return self._parts[part]


class _Part:
    """One part, as this process reads it: an item for each place, in the order in which places are asked for."""

    def __init__(self, part: int, iterator: PartIterator, *, keep: int) -> None:
        self._name, self._iterator, self._keep = part, iterator, keep
        self._at: dict[int, Any] = {}  # by place
        self._places: list[int] = []  # a heap of the same places
        self._newest = -1  # the highest of them
        self._next: deque[Any] = deque()  # read, and free for a place
        self.computed: set[int] = set()  # places
        self.read = 0
        self._failed, self._ended = "", False

    def take(self, places: Sequence[int]) -> list[Any]:
        """Return the items at these places. Raises EndOfStream, and NotASample if the iterator has raised an error."""
        self._forget(places[0], places[-1])
        for place in places:
            if place not in self._at:
                self._at[place] = self._one()
                heapq.heappush(self._places, place)
                self._newest = max(self._newest, place)
        return [own(self._at[place]) for place in places]

    def has(self, places: Sequence[int]) -> bool:
        """True if there are items for all of these places. Errors show when they are taken."""
        try:
            self.take(places)
        except EndOfStream:
            return False
        except NotASample:
            return True
        return True

    def _one(self) -> Any:
        if self._next:
            return self._next.popleft()
        if self._failed:
            raise NotASample(self._failed)
        if self._ended:  # a queue might be waited for again
            raise EndOfStream(self._name, self.read)
        with self._iterator.running() as iterator:
            try:
                item = next(iterator)
            except StopIteration:
                self._ended = True
                raise EndOfStream(self._name, self.read) from None
            except Exception as error:
                self._failed = (
                    f"part {self._name} of the stream raised {type(error).__name__} after {self.read} items: {error}. "
                    "It comes only once and is not opened again: let the iterator connect again by itself, and do "
                    "what may fail for one item in transform="
                )
                raise NotASample(self._failed) from error
        self.read += 1
        return item

    def _forget(self, first: int, last: int) -> None:
        """Keep the places near these. Items that no version can have are free again: of places that were read ahead and
        not computed, and of places ahead that a roll-back to a snapshot has undone."""
        while self._places and self._places[0] < first - self._keep:
            self._drop(heapq.heappop(self._places), undone=False)
        if self._newest > (newest := last + self._keep):
            places = sorted(self._places)
            kept = bisect.bisect_right(places, newest)
            for place in places[kept:]:
                self._drop(place, undone=True)
            self._places = places[:kept]
            self._newest = self._places[-1] if self._places else -1

    def _drop(self, place: int, *, undone: bool) -> None:
        item = self._at.pop(place)
        if undone or place not in self.computed:
            self._next.append(item)
        self.computed.discard(place)


def check_once(processes: int) -> None:
    """Raise DataError for what a stream that comes only once cannot be read with."""
    if processes:
        raise DataError(
            f"loader=rp.Loader(workers={processes}) with a stream that comes only once: what loader processes have "
            "read ahead is lost with them, and nobody would know how much; leave workers out, and read ahead in the "
            "iterator if you need it"
        )
