"""The port of a process, shared by its connections: each is paced at its part of what the port is measured to carry.

Of flows that share the port of a switch TCP gives some more than others. A sum waits for the last of them, so versions
go out late, and one direction of each link is idle meanwhile. Connections that send evenly, together a little less than
the port carries, complete sums in order.

With `reduce.py --workers 4 --servers 4 --rate 200 --megabytes 25 --shard-kib 256 --pace P`, where a port carries 191, a
synchronisation takes 1.12 x K/B with 190, 1.23 with 206, 1.35 with 225.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Protocol

from rallypoint.core.plan.port import PortPacer, Sent
from rallypoint.net.transport import LEAST_PACE

log = logging.getLogger("rallypoint")


class Paceable(Protocol):
    """A connection as a port knows it."""

    @property
    def local(self) -> bool:
        """Are both its ends on one host? Such a connection takes nothing of the port."""

    def sent(self) -> Sent | None:
        """What it has sent; None where the system does not say, or when it has ended."""

    def pace(self, rate: int) -> None:
        """Send at most `rate` bytes a second; 0: as TCP likes."""


class Port:
    """Thread-safe. Where a connection that shares it stays on the host, nothing is paced: another process sends through
    the same port then, and the faster way must not wait.

    A thread of its own looks while connections to other hosts share the port. It ends with the last of them.
    """

    def __init__(self, pacer: PortPacer | None = None) -> None:
        self._pacer = pacer or PortPacer()
        self._changed = threading.Condition()
        self._parts: dict[Paceable, float] = {}
        self._locals = 0  # of those
        self._paced = 0.0  # bytes a second: what is set on the connections, together
        self._blind = False  # this system does not say what connections have sent
        self._thread: threading.Thread | None = None

    def share(self, connection: Paceable, part: float) -> None:
        """From now on `connection` gets that part (0 to 1) of the port; with 0 it does not share the port any more, and
        is not paced."""
        with self._changed:
            known = self._parts.pop(connection, None) is not None
            self._locals -= known and connection.local
            if part:
                self._parts[connection] = part
                self._locals += connection.local
                connection.pace(self._of(part))
            elif known:
                connection.pace(0)
            self._pace()
            if self._thread is None and self._looks():
                self._start()
            self._changed.notify_all()

    def _looks(self) -> bool:
        return bool(self._parts) and not self._locals and not self._blind

    def _of(self, part: float) -> int:
        return max(LEAST_PACE, round(self._paced * part)) if self._paced else 0

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="port", daemon=True)
        with contextlib.suppress(RuntimeError):  # there is no thread to be had: nothing is paced
            thread.start()
            self._thread = thread

    def _pace(self) -> None:
        """Set on all connections what the pacer says, if that has changed."""
        rate = self._pacer.rate if self._looks() else 0.0
        if rate != self._paced:
            self._paced = rate
            for connection, part in self._parts.items():
                connection.pace(self._of(part))
            if rate:
                log.info("this port carries about %.3g Mbit/s: %d links are paced", rate * 8e-6, len(self._parts))

    def _run(self) -> None:
        with self._changed:
            try:
                while self._looks():
                    seconds = self._pacer.look(time.monotonic(), self._sent())
                    self._pace()
                    self._changed.wait_for(lambda: not self._looks(), seconds)
            finally:
                self._pacer.rest()
                self._pace()
                self._thread = None

    def _sent(self) -> dict[Paceable, Sent]:
        told = {one: sent._replace(part=part) for one, part in self._parts.items() if (sent := one.sent()) is not None}
        self._blind = not told
        return told
