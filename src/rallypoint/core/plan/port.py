"""What a process's port carries, from what its connections send; and the pace that follows.

The rate of a port is the one that the sum of its connections reaches and does not exceed. A window of time counts only
if nearly all connections had bytes that waited for the network: a process that pauses between two steps, one slow
connection that the others wait for, and one whose messages are only on a long way say nothing of the port. Of the
windows that count, a port that is full makes most alike: the plateau. Where there is none (processors are what is slow,
or others send through the port) nothing is known.

What is acknowledged counts, not what is sent: that may wait in a queue on its way, and of a window much would. Replayed
over what eight processes (4 workers, 4 servers) recorded every 20 ms, from 64 beginnings each, 4.7 s after them:

    links of 200 Mbit/s carry 191 of payload: 0.983 of that are found [0.97 to 1.00], standard deviation 0.010
    links of 1 Gbit/s, 956: 0.984 [0.96 to 1.00], 0.010
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

WINDOW_S = 0.2  # in a shorter one what the kernel takes in advance counts for too much
SAMPLE_S = 0.05  # between two calls of `PortPacer.look`, while it measures
GIVE_UP_S = 30.0
AGAIN_S = 120.0  # a link may have become faster; while one measures, it sends as without pacing
PACE = 1.01  # of what is found, which is 2 % less than a port carries: 1 % less is enough
LEAST = 1e6  # bytes a second: slower ports are not paced
ENOUGH = 24  # windows that count, of the last so many; they overlap
_MOST = 48
_FULL = 0.7  # of all connections and all of a window: so much waited for the network
_ALIKE = 0.9  # windows that reach so much of the best ones' rate are the plateau
_PLATEAU = 0.5  # of all windows that count: at least so many are alike


class Sent(NamedTuple):
    """Of one connection.

    Attributes:
        acknowledged: bytes, until now.
        held_back: seconds until now in which some were on their way, and neither the other side's window nor the buffer
            here was what held them back.
        waits: there are bytes now that the network has not taken.
        part: of the port that is this connection's, 0 to 1.
    """

    acknowledged: int
    held_back: float
    waits: bool
    part: float = 1.0


class _Mark(NamedTuple):
    at: float
    acknowledged: int
    held_back: float


@dataclass(slots=True)
class PortMeter:
    """Finds `rate`. Call `sampled` several times in each WINDOW_S."""

    _last: dict[Hashable, Sent] = field(default_factory=dict)
    _marks: deque[_Mark] = field(default_factory=deque)
    _windows: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST))

    def sampled(self, now: float, sent: Mapping[Any, Sent]) -> None:
        """What each open connection has sent; `now` in seconds. One that is new counts from the next call on."""
        both = [(self._last[key], value) for key, value in sent.items() if key in self._last]
        self._last = dict(sent)
        last = self._marks[-1] if self._marks else _Mark(now, 0, 0.0)
        acknowledged = last.acknowledged + sum(max(0, new.acknowledged - old.acknowledged) for old, new in both)
        waited = sum(new.part * (new.held_back - old.held_back) for old, new in both if old.waits and new.waits)
        parts = min(1.0, sum(value.part for value in sent.values()))  # more: some of them send nothing
        held_back = last.held_back + waited / max(1e-9, parts)
        self._marks.append(_Mark(now, acknowledged, held_back))
        while len(self._marks) > 2 and self._marks[1].at <= now - WINDOW_S:
            self._marks.popleft()
        first, seconds = self._marks[0], now - self._marks[0].at
        if seconds >= WINDOW_S and held_back - first.held_back >= _FULL * seconds:
            self._windows.append((acknowledged - first.acknowledged) / seconds)

    @property
    def rate(self) -> float:
        """Bytes a second that the port carries; 0.0: not known (yet)."""
        if len(self._windows) < ENOUGH:
            return 0.0
        rates = sorted(self._windows)
        best = rates[round(0.95 * (len(rates) - 1))]  # above are those that began with an empty queue
        plateau = [rate for rate in rates if rate >= _ALIKE * best]
        return median(plateau) if len(plateau) >= _PLATEAU * len(rates) else 0.0


@dataclass(slots=True)
class PortPacer:
    """Decides when to measure, and the pace.

        measuring   until the rate is known, unpaced, for at most GIVE_UP_S
        paced       for AGAIN_S at about that rate; where none was found, unpaced. Then measuring again

    Attributes:
        rate: bytes a second that all connections together are to send at most; 0.0: no limit.
    """

    rate: float = 0.0
    _found: float = 0.0  # the pace that follows from the last measurement
    _due: float = -math.inf
    _meter: PortMeter | None = None
    _ends: float = 0.0

    def look(self, now: float, sent: Mapping[Any, Sent]) -> float:
        """What connections have sent until `now` (seconds): see `PortMeter.sampled`. It may change `rate`.

        Returns after how many seconds to call it again; earlier calls change nothing while it does not measure.
        """
        if self._meter is None:
            if now < self._due:
                return self._due - now
            self._meter, self._ends, self.rate = PortMeter(), now + GIVE_UP_S, 0.0
        self._meter.sampled(now, sent)
        found = self._meter.rate
        if not found and now < self._ends:
            return SAMPLE_S
        self._found = PACE * found if found >= LEAST else 0.0
        self.rest()
        self._due = now + AGAIN_S
        return AGAIN_S

    def rest(self) -> None:
        """No connection shares the port any more. What is being measured is forgotten, what was found is not."""
        self._meter, self.rate = None, self._found
