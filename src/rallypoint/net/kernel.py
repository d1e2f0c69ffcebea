"""What the kernel knows of a TCP connection (linux/tcp.h, struct tcp_info), and what it is told."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import sys

from rallypoint.core.tuning.port import Sent
from rallypoint.observe.usage import LinkPace

DEAD_AFTER_S = 3.0  # a link without TCP acknowledgements for this long is lost
UNSENT_BYTES = 512 << 10  # unsent bytes in the kernel: few, so that credits can overtake bulk data
SO_MAX_PACING_RATE = 47  # asm-generic/socket.h: bytes a second; all ones: no limit
ENDED = 7  # TCP_CLOSE, the state of a connection that has ended by an error (include/net/tcp_states.h)
_32_BITS = (1 << 32) - 1
_SO_RCVBUFFORCE = 33
_SO_BUF_LOCK, _RECEIVE = 72, 2  # which buffers the kernel may not change
_UNLIMITED = 3 << 20  # bytes; the kernel takes twice as many, and that is how far it goes by itself (tcp_rmem)

_STATE = struct.Struct("=B51xII")  # the state; tcpi_last_data_recv and tcpi_last_ack_recv in milliseconds
_PACE = struct.Struct("=120xQ40xQ")  # tcpi_bytes_acked, and tcpi_busy_time in microseconds (Linux 4.10)
# tcpi_bytes_acked, tcpi_notsent_bytes; tcpi_busy_time, tcpi_rwnd_limited, tcpi_sndbuf_limited in microseconds (4.10)
_SENT = struct.Struct("=120xQ16xI20xQQQ")
_ROUND_TRIP = struct.Struct("=68xI")  # tcpi_rtt, smoothed, in microseconds


def state_of(sock: socket.socket) -> tuple[int, float]:
    """The state of a connection, and the seconds since the other machine has sent anything, if only an answer to a
    keepalive. (0, infinity) where the system does not tell."""
    with contextlib.suppress(OSError, struct.error, AttributeError):  # closed meanwhile; an older or another system
        state, *milliseconds = _STATE.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _STATE.size))
        return state, min(milliseconds) / 1000
    return 0, math.inf


def round_trip_of(sock: socket.socket) -> float:
    """Seconds; 0 where the system does not tell, or the socket is closed."""
    with contextlib.suppress(OSError, struct.error, AttributeError):
        found = _ROUND_TRIP.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size))
        return float(found[0]) / 1e6
    return 0.0


def pace_of(sock: socket.socket) -> LinkPace:
    """What was acknowledged, and for how long some was on its way; nothing where the system does not tell, or the
    socket is closed. The kernel counts the time in its ticks, of 1 to 4 ms."""
    with contextlib.suppress(OSError, struct.error, AttributeError):
        acknowledged, busy = _PACE.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _PACE.size))
        return LinkPace(acknowledged, busy / 1e6)
    return LinkPace()


def sent_of(sock: socket.socket) -> Sent | None:
    """What was acknowledged, for how long something was on its way, and whether more waits. None where the system does
    not tell, or the socket is closed."""
    with contextlib.suppress(OSError, struct.error, AttributeError):
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT.size)
        acknowledged, unsent, busy, window, buffer = _SENT.unpack(told)
        return Sent(acknowledged, (busy - window - buffer) / 1e6, unsent > 0)
    return None


def is_local(sock: socket.socket) -> bool:
    """Are both ends on this host? True also for a socket that is not connected (any more), or has no addresses."""
    try:
        return bool(sock.getsockname()[:1] == sock.getpeername()[:1])
    except OSError:
        return True


def set_pace(sock: socket.socket, rate: int) -> None:
    """Limit a socket to `rate` bytes a second; 0: no limit. Kernels before 4.20 (2018) count with 32 bits: they get no
    limit in place of one that has wrapped."""
    if 0 < rate < _32_BITS:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", rate))
        return
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, -1)
    if rate and len(sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)) == 8:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", rate))


def limit_received(sock: socket.socket, nbytes: int) -> None:
    """Let only about `nbytes` wait for the reader; 0: as the kernel likes. It may allow less (net.core.rmem_max).

    Before a limit is taken back the buffer becomes as large as it may (beyond net.core.rmem_max with CAP_NET_ADMIN
    only): the kernel grows a small one only when more comes in a round trip than ever before. From there on it chooses
    by itself again (Linux 5.14; else that buffer stays).
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes or _UNLIMITED)
    if nbytes or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _UNLIMITED)
    with contextlib.suppress(OSError):
        locked = sock.getsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK)
        sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, locked & ~_RECEIVE)


def tune(sock: socket.socket) -> None:
    """Make a link quick, and lost when nothing is acknowledged for `DEAD_AFTER_S`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    choose_cubic(sock)
    for option, value in (
        ("TCP_USER_TIMEOUT", int(DEAD_AFTER_S * 1000)),
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", int(DEAD_AFTER_S)),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
    ):
        if hasattr(socket, option):  # not every system has every option
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def choose_cubic(sock: socket.socket) -> None:
    """Use CUBIC, whatever this machine's default is."""
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # not built into this kernel: its default is fine
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
