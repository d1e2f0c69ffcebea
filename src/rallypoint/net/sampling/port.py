"""The port of a process, shared by its connections: each is paced at its part of what the port is measured to carry.

Of flows that share the port of a switch TCP gives some more than others. A sum waits for the last of them, so versions
go out late, and one direction of each link is idle meanwhile. Connections that send evenly, together a little less than
the port carries, complete sums in order.

    measuring   every SAMPLE_S, unpaced, until the rate is known (`core.tuning.port`), for at most GIVE_UP_S
    paced       for AGAIN_S at about that rate; where none was found, at the one from before. Then measuring again

With `reduce.py --workers 4 --servers 4 --rate 200 --megabytes 25 --shard-kib 256 --pace P`, where a port carries 191, a
synchronisation takes 1.12 x K/B with 190, 1.23 with 206, 1.35 with 225.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from rallypoint.core.tuning.port import PortMeter, Sent

SAMPLE_S = 0.05
GIVE_UP_S = 30.0
PACED = 1.01  # of what is found: that is 2 % less than a port carries, and 1 % less is enough
AGAIN_S = 120.0  # a link may have become faster; while one measures, it sends as without pacing


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

    A thread of its own measures while connections to other hosts share the port. `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._parts: dict[Paceable, float] = {}
        self._locals = 0  # of those
        self._rate = 0.0  # bytes a second that are paced; 0: no pace
        self._thread: threading.Thread | None = None

    @property
    def rate(self) -> float:
        """Bytes a second that all connections together send at most; 0.0: no limit."""
        return self._rate

    def share(self, connection: Paceable, part: float) -> None:
        """From now on `connection` gets that part (0 to 1) of the port; with 0 it does not share the port any more, and
        is not paced."""
        with self._changed:
            before, known = self._measures(), self._parts.pop(connection, None) is not None
            self._locals -= known and connection.local
            if part:
                self._parts[connection] = part
                self._locals += connection.local
            elif known:
                connection.pace(0)
            if self._measures() != before:
                self._pace_all()
            elif part and before:
                connection.pace(round(self._rate * part))
            if self._thread is None and self._measures():
                self._thread = threading.Thread(target=self._run, name="port", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _measures(self) -> bool:
        return bool(self._parts) and not self._locals

    def _pace_all(self) -> None:
        rate = self._rate if self._measures() else 0.0
        for connection, part in self._parts.items():
            connection.pace(round(rate * part))

    def _run(self) -> None:
        before = 0.0
        while True:
            found = self._measure()
            if found is None:
                return
            before = PACED * found or before
            import os; open(f"/tmp/dbg/port{os.getpid()}","a").write(f"{self._clock():.2f} {found*8e-6:.1f} n={len(self._parts)} {sorted(self._parts.values())}\n")
            if not self._set(before) or not self._wait(AGAIN_S) or not self._set(0.0):
                return

    def _measure(self) -> float | None:
        """Returns bytes a second, 0.0 if there is no plateau, and None when nobody shares the port any more."""
        meter, ends = PortMeter(), self._clock() + GIVE_UP_S
        while not meter.rate and (now := self._clock()) < ends:
            with self._changed:
                connections = [*self._parts]
            found = {connection: sent for connection in connections if (sent := connection.sent()) is not None}
            meter.sampled(now, found)
            if not self._wait(SAMPLE_S):
                return None
        return meter.rate

    def _set(self, rate: float) -> bool:
        with self._changed:
            self._rate = rate
            self._pace_all()
        return self._wait(0.0)

    def _wait(self, seconds: float) -> bool:
        """Returns False at once when there is nothing to measure any more: the thread ends."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._measures(), seconds):
                self._thread, self._rate = None, 0.0
                self._pace_all()
                return False
        return True
