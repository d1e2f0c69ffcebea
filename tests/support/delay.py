"""The program that delays a lab's uplinks: what one end of an uplink takes, the other gives back `seconds` later.

    python delay.py SECONDS up1:down1 up2:down2 ...

Each name is a TAP interface that the program makes in its own network namespace. It prints ``up`` when all are there,
and ends, with its interfaces, when its standard input ends. The kernel hands over TCP's data in pieces of up to 64 KiB
(``TUN_F_TSO4``), so 100 Mbit/s are some hundred of them a second. Rates are not its affair: the interfaces have queues
(`tc`), and each piece is late by the same time, so order and spacing stay. It imports nothing but the standard library,
and starts in 50 ms.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

HELD_BYTES = 256 << 20  # of one direction; beyond it a piece is lost, as in a router whose memory is full
_TUN = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # from <linux/if_tun.h>
_TAP, _NO_INFO, _VNET_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TSO4 = 0x01, 0x02
_PIECE = 1 << 17  # a piece is at most 64 KiB and its headers
_AT_ONCE = 64  # pieces read in a row before the late ones are looked at again


class Line:
    """What is on its way in one direction: pieces from `source`, each to be written to `sink` when its time is up."""

    def __init__(self, source: int, sink: int, seconds: float) -> None:
        self.source = source
        self._sink, self._seconds = sink, seconds
        self._held: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def take(self, now: float) -> None:
        """Read what the interface has."""
        for _ in range(_AT_ONCE):
            try:
                piece = os.read(self.source, _PIECE)
            except BlockingIOError:
                return
            if self._bytes + len(piece) <= HELD_BYTES:
                self._held.append((now + self._seconds, piece))
                self._bytes += len(piece)

    def give(self, now: float) -> float | None:
        """Write what is due. Returns when the next piece is; None: there is none."""
        while self._held and self._held[0][0] <= now:
            _, piece = self._held.popleft()
            self._bytes -= len(piece)
            with contextlib.suppress(OSError):  # the interface is not up (yet): the piece is lost
                os.write(self._sink, piece)
        return self._held[0][0] if self._held else None


def tap(name: str) -> int:
    """Make a TAP interface; returns its descriptor. The interface is gone when that is closed."""
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_INFO | _VNET_HEADER))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUM | _TSO4)
    return descriptor


def run(seconds: float, pairs: list[tuple[str, str]]) -> None:
    """Delay each pair's frames until standard input ends."""
    lines: dict[int, Line] = {}
    for one, other in pairs:
        here, there = tap(one), tap(other)
        lines |= {here: Line(here, there, seconds), there: Line(there, here, seconds)}
    with contextlib.suppress(OSError):
        os.nice(-10)  # it is the wire: what it waits for a core would be added to the delay
    waits = select.epoll()
    for descriptor in (*lines, sys.stdin.fileno()):
        waits.register(descriptor, select.EPOLLIN)
    print("up", flush=True)
    due: float | None = None
    while True:
        events = waits.poll(None if due is None else max(0.0, due - time.monotonic()))
        if any(descriptor == sys.stdin.fileno() for descriptor, _ in events):
            return
        now = time.monotonic()
        for descriptor, _ in events:
            lines[descriptor].take(now)
        times = [line.give(time.monotonic()) for line in lines.values()]
        due = min((when for when in times if when is not None), default=None)


if __name__ == "__main__":
    run(float(sys.argv[1]), [(one, other) for one, _, other in (pair.partition(":") for pair in sys.argv[2:])])
