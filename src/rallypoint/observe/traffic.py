"""How many bytes a transport's connections have sent and received."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple


class Link(NamedTuple):
    """The connections to one address: bytes until now, and the round trip (s; 0: unknown)."""

    sent: int = 0
    received: int = 0
    round_trip: float = 0.0


class Pace(NamedTuple):
    """Bytes that the other side has acknowledged until now, and seconds in which some were on their way."""

    acknowledged: int = 0
    busy: float = 0.0


class Flow:
    """The bytes of one connection. One thread adds to `sent`, another to `received`; any may read.

    `address`: where it was dialed; "" if it was accepted. `round_trip` returns seconds; `pace` what it says.
    """

    __slots__ = ("address", "pace", "received", "round_trip", "sent")

    def __init__(
        self, address: str = "", round_trip: Callable[[], float] = lambda: 0.0, pace: Callable[[], Pace] = Pace
    ) -> None:
        self.sent = self.received = 0
        self.address, self.round_trip, self.pace = address, round_trip, pace


class Traffic:
    """The bytes of all connections of a transport, those that have ended included. Thread-safe.

    Counting costs a connection one addition for each system call, and no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Flow, None] = {}
        self._ended = Flow()

    def opened(
        self, address: str = "", round_trip: Callable[[], float] = lambda: 0.0, pace: Callable[[], Pace] = Pace
    ) -> Flow:
        """A connection begins. Returns what it counts in. For the arguments see `Flow`."""
        flow = Flow(address, round_trip, pace)
        with self._lock:
            self._open[flow] = None
        return flow

    def closed(self, flow: Flow) -> None:
        """That connection has ended: it counts no more. May be called more than once."""
        with self._lock:
            if flow in self._open:
                del self._open[flow]
                self._ended.sent += flow.sent
                self._ended.received += flow.received

    def links(self) -> dict[str, Link]:
        """The links that are open and were dialed, by address."""
        with self._lock:
            flows = [flow for flow in self._open if flow.address]
        found: dict[str, Link] = {}
        for flow in flows:
            also = found.get(flow.address, Link())
            round_trip = max(also.round_trip, flow.round_trip())
            found[flow.address] = Link(also.sent + flow.sent, also.received + flow.received, round_trip)
        return found

    def paces(self) -> dict[Flow, Pace]:
        """The pace of each connection that is open."""
        with self._lock:
            flows = [*self._open]
        return {flow: flow.pace() for flow in flows}

    def totals(self) -> tuple[int, int]:
        """The bytes sent and received until now, by all connections together."""
        with self._lock:
            flows = [self._ended, *self._open]
            return sum(flow.sent for flow in flows), sum(flow.received for flow in flows)
