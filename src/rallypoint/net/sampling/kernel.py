"""What the kernel knows of a TCP connection (linux/tcp.h, struct tcp_info)."""

from __future__ import annotations

import contextlib
import socket
import struct

from rallypoint.observe.traffic import Pace

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h: bytes a second; all ones: no limit
_32_BITS = (1 << 32) - 1

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


def set_pace(sock: socket.socket, rate: int) -> None:
    """Limit a socket to `rate` bytes a second; 0: no limit. Kernels before 4.20 (2018) count with 32 bits: they get no
    limit in place of one that has wrapped."""
    if 0 < rate < _32_BITS:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", rate))
        return
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, -1)
    if rate and len(sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)) == 8:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", rate))
