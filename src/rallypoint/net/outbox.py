"""The frames that wait to be sent on one channel, and how many bytes of them may."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from rallypoint.net.frames import Header
from rallypoint.net.seal import SEALED_BYTES

Rank = tuple[int, ...]  # compared as tuples are; () is the lowest

_ITS_OWN = object()  # begins the place of a frame that has none


class Outgoing(NamedTuple):
    """A frame, and what to call when its payload may be reused. Its header says how long the payload is."""

    header: Header
    payload: memoryview | None
    sent: Callable[[], None] | None


class Backlog:
    """How many bytes may wait on one channel (`most`), and on all channels that share this object (`most_in_all`).

    Frames with a place do not count: there is one for each place. Thread-safe.
    """

    def __init__(self, most: int, most_in_all: int) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0
        self.allow(most, most_in_all)

    def allow(self, most: int, most_in_all: int) -> None:
        """Change the limits."""
        self.most, self.most_in_all = most, most_in_all

    def change(self, nbytes: int, own: int) -> bool:
        """Count `nbytes` more (or less), after which `own` wait on that channel. Returns False if that is too much.

        If too much waits on all channels together, it is too much for those with more than a quarter of `most`.
        """
        with self._lock:
            self.nbytes += nbytes
            return own <= self.most and (self.nbytes <= self.most_in_all or own <= self.most // 4)


class Outbox:
    """Urgent frames go first, then the others: those of a lower rank before those of a higher one, and those of equal
    rank in the order in which they were added. Not thread-safe.

    A frame may have a place, such as ("version", 7): then it replaces the frame that waits at that place, and goes out
    in its stead. So of each shard only the newest version waits for a slow follower, and every shard gets its share of
    a slow link. `nbytes` counts the payloads that wait. All frames without a place count in `backlog`, if there is one.
    """

    def __init__(self, backlog: Backlog | None = None) -> None:
        self._backlog, self._counted = backlog, 0
        self._urgent: deque[Outgoing] = deque()
        self._others: dict[Hashable, Outgoing] = {}
        self._places: list[tuple[Rank, int, Hashable]] = []  # a heap: the next place to send from is its first
        self._numbers = itertools.count()
        self.nbytes = 0
        self.overflows = False  # more waits than the backlog allows

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def add(
        self, frame: Outgoing, place: Hashable = None, *, urgent: bool = False, rank: Rank = ()
    ) -> Outgoing | None:
        """Append a frame. Returns the frame that it has replaced, if there is one: it takes that one's turn."""
        self.nbytes += frame.header.length
        if urgent:
            self._urgent.append(frame)
            self._count(frame, 1)
            return None
        number = next(self._numbers)
        if place is None:
            place = (_ITS_OWN, number)
            self._count(frame, 1)
        old = self._others.get(place)
        self._others[place] = frame
        if old is None:
            heapq.heappush(self._places, (rank, number, place))
        if old is not None:
            self.nbytes -= old.header.length
        return old

    def pop(self) -> Outgoing:
        """Take out the next frame. There must be one."""
        if self._urgent:
            frame, counts = self._urgent.popleft(), True
        else:
            _, _, place = heapq.heappop(self._places)
            frame = self._others.pop(place)
            counts = isinstance(place, tuple) and place[0] is _ITS_OWN
        self.nbytes -= frame.header.length
        if counts:
            self._count(frame, -1)
        return frame

    def _count(self, frame: Outgoing, sign: int) -> None:
        nbytes = sign * (SEALED_BYTES + frame.header.length)
        self._counted += nbytes
        if self._backlog is not None:
            self.overflows = not self._backlog.change(nbytes, self._counted)
