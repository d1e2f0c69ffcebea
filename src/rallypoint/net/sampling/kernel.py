"""What the kernel knows of a TCP connection (linux/tcp.h, struct tcp_info)."""

from __future__ import annotations

import contextlib
import socket
import struct

from rallypoint.observe.traffic import Pace

_PACE = struct.Struct("=120xQ40xQ")  # tcpi_bytes_acked, and tcpi_busy_time in microseconds (Linux 4.10)
_ROUND_TRIP = struct.Struct("=68xI")  # tcpi_rtt, smoothed, in microseconds


def round_trip_of(sock: socket.socket) -> float:
    """Seconds; 0 where the system does not tell, or the socket is closed."""
    with contextlib.suppress(OSError, struct.error, AttributeError):
        found = _ROUND_TRIP.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size))
        return float(found[0]) / 1e6
    return 0.0


def pace_of(sock: socket.socket) -> Pace:
    """What was acknowledged, and for how long some was on its way; nothing where the system does not tell, or the
    socket is closed. The kernel counts the time in its ticks, of 1 to 4 ms."""
    with contextlib.suppress(OSError, struct.error, AttributeError):
        acknowledged, busy = _PACE.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _PACE.size))
        return Pace(acknowledged, busy / 1e6)
    return Pace()
