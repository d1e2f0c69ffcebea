"""How many bytes a transport's connections have sent and received."""

from __future__ import annotations

import threading


class Flow:
    """The bytes of one connection. One thread adds to `sent`, another to `received`; any may read."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.sent = self.received = 0


class Traffic:
    """The bytes of all connections of a transport, those that have ended included. Thread-safe.

    Counting costs a connection one addition for each system call, and no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Flow, None] = {}
        self._ended = Flow()

    def opened(self) -> Flow:
        """A connection begins. Returns what it counts in."""
        flow = Flow()
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

    def totals(self) -> tuple[int, int]:
        """The bytes sent and received until now, by all connections together."""
        with self._lock:
            flows = [self._ended, *self._open]
            return sum(flow.sent for flow in flows), sum(flow.received for flow in flows)
