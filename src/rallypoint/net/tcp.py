"""Byte streams over TCP, with blocking sockets and threads."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from rallypoint.core.plan.port import Sent
from rallypoint.errors import AddressInUse, LinkClosed, LinkError, LinkReset, UsageError
from rallypoint.net.handshake import expand
from rallypoint.net.memory import LABEL, OFFER, HostLender, agreed
from rallypoint.net.sampling import Port
from rallypoint.net.transport import PLAIN, Secured
from rallypoint.observe.lines import Sparingly
from rallypoint.observe.usage import LinkPace, Traffic

# ---- What the kernel knows of a TCP connection (linux/tcp.h, struct tcp_info), and what it is told ----

DEAD_AFTER_S = 3.0  # a link whose other machine answers nothing for this long is lost
_LOOK_S = 1  # so often a thread that waits looks whether it still answers
_LONGEST_PROBE_S = 120.0  # TCP_RTO_MAX
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
# tcpi_retransmits, tcpi_probes, tcpi_backoff; tcpi_rto (us); tcpi_unacked; the times of `_STATE`; tcpi_notsent_bytes;
# tcpi_snd_wnd (Linux 5.4)
_UNANSWERED = struct.Struct("=2xBBB3xI12xI24xII84xI80xI")
_ROUND_TRIP = struct.Struct("=68xI")  # tcpi_rtt, smoothed, in microseconds


def _told(sock: socket.socket, fields: struct.Struct) -> tuple[int, ...] | None:
    """What the kernel tells of a connection. None if the socket is closed, or the kernel is too old."""
    with contextlib.suppress(OSError, struct.error):
        return fields.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, fields.size))
    return None


def state_of(sock: socket.socket) -> tuple[int, float]:
    """The state of a connection, and the seconds since the other machine has sent anything, if only an answer to a
    keepalive. (0, infinity) where the system does not tell."""
    if (told := _told(sock, _STATE)) is None:
        return 0, math.inf
    return told[0], min(told[1:]) / 1000


def is_dead(sock: socket.socket) -> bool:
    """True if something is to be sent, and the other machine has answered nothing for `DEAD_AFTER_S`.

    One whose process does not read answers the probes of its full window, which come more and more rarely.
    """
    if (told := _told(sock, _UNANSWERED)) is None:
        return False
    _, probes, backoff, timeout, unacked, *silent, unsent, window = told
    probe = 0.0 if window or probes > 2 else min((timeout << backoff) / 1e6, _LONGEST_PROBE_S)
    return bool(unacked or (unsent and not window)) and min(silent) / 1000 > DEAD_AFTER_S + probe


def is_deaf(sock: socket.socket) -> bool:
    """True if the other machine, which may well send, has not acknowledged for `DEAD_AFTER_S` what was sent again and
    again: long packets are lost on the way, since a tunnel has begun or a host has a smaller MTU.

    The time-out doubles with each repeat, so when it is 3 s the first packet was sent about as long ago.
    """
    retransmits, _, _, timeout, unacked, *_, window = _told(sock, _UNANSWERED) or (0,) * 9
    return bool(unacked and window) and retransmits > 2 and timeout / 1e6 > DEAD_AFTER_S


def round_trip_of(sock: socket.socket) -> float:
    """Seconds; 0 where the system does not tell, or the socket is closed."""
    return (_told(sock, _ROUND_TRIP) or (0,))[0] / 1e6


def pace_of(sock: socket.socket) -> LinkPace:
    """What was acknowledged, and for how long some was on its way; nothing where the system does not tell, or the
    socket is closed. The kernel counts the time in its ticks, of 1 to 4 ms."""
    acknowledged, busy = _told(sock, _PACE) or (0, 0)
    return LinkPace(acknowledged, busy / 1e6)


def sent_of(sock: socket.socket) -> Sent | None:
    """What was acknowledged, for how long something was on its way, and whether more waits. None where the system does
    not tell, or the socket is closed."""
    if (told := _told(sock, _SENT)) is None:
        return None
    acknowledged, unsent, busy, window, buffer = told
    return Sent(acknowledged, (busy - window - buffer) / 1e6, unsent > 0)


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
    if nbytes:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _UNLIMITED)
    with contextlib.suppress(OSError):
        locked = sock.getsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK)
        sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, locked & ~_RECEIVE)


def tune(sock: socket.socket) -> None:
    """Make a link quick. A machine that does not answer is noticed by keepalives, or by `is_dead` while something is to
    be sent: with TCP_USER_TIMEOUT a process that does not read for so long would be taken for dead."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    choose_cubic(sock)
    for wait in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # of a socket without a time-out of Python's
        sock.setsockopt(socket.SOL_SOCKET, wait, struct.pack("ll", _LOOK_S, 0))
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, int(DEAD_AFTER_S)),
        (socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def choose_cubic(sock: socket.socket) -> None:
    """Use CUBIC, whatever this machine's default is."""
    with contextlib.suppress(OSError):  # not built into this kernel: its default is fine
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


# ---- Byte streams over TCP, with blocking sockets and threads ----
#
# `sendmsg` sends header and payload together; `recv_into` fills the final buffer. On links of 1 Gbit/s between
# containers on two cores this comes within a few per cent of what TCP itself allows (docs/performance.md); an event
# loop or native code gained nothing there.

_BACKLOG = 256
_FULL = {errno.EMFILE, errno.ENFILE}
_PAUSE_S = 0.05
# A reset by a machine that has answered within so many seconds (keepalives are a second apart) comes from a dead
# process. One whose TCP had given the connection up has not answered for `DEAD_AFTER_S`.
_ANSWERED_S = 2.0


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` into a pair. UsageError if it is not an address."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"'{address}' is not an address: write host:port, as 127.0.0.1:4700 (port 0: any free one)")
    if ":" in host and not is_ipv6(host.strip("[]")):
        raise UsageError(f"'{address}' is not an address: an IPv6 address stands in brackets, as [fd00::1]:4700")
    return host.strip("[]"), int(port)


def is_ipv6(host: str) -> bool:
    """Is this an IPv6 address, without brackets and port?"""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


class TcpConnection:
    """A Connection over a connected socket.

    `close` ends the stream at once. The descriptor is closed when no thread uses it any more: else its number could
    belong to another connection by the time a thread that is about to receive asks the system for its bytes.
    """

    secured: Secured = PLAIN
    lender: HostLender | None = None

    def __init__(
        self, sock: socket.socket, peer: str, traffic: Traffic | None = None, *, dialed: bool = False,
        port: Port | None = None,
    ) -> None:  # fmt: skip
        self._socket = sock
        self.peer = peer
        self._deadline: float | None = None
        self._lock = threading.Lock()
        self._users, self._closed, self._dead = 0, False, False  # `_users`: threads inside `send` and `recv_into`
        self._look_at = 0.0
        tune(sock)
        self._port = port or Port()
        self.local = is_local(sock)
        self._traffic = traffic or Traffic()
        self._flow = self._traffic.opened(peer if dialed else "", lambda: round_trip_of(sock), lambda: pace_of(sock))

    @property
    def offers(self) -> str:
        """Lending, to a member of this host."""
        return OFFER if self.local else ""

    def upgrade(self, sending: bytes, receiving: bytes) -> None:
        self.lender = agreed(self, expand(sending, LABEL), expand(receiving, LABEL), self.count)

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self._enter()
        try:
            left = [memoryview(head)] if payload is None else [memoryview(head), payload]
            while left:
                if self._deadline is not None:
                    self._socket.settimeout(self._left())
                try:
                    sent = self._socket.sendmsg(left)
                except BlockingIOError:
                    self._end_if(is_dead)
                    continue
                self._flow.sent += sent
                left = _after(left, sent)
        except (OSError, ValueError) as error:
            raise LinkError(f"the link to {self.peer} broke while sending: {error}") from None
        finally:
            self._leave()

    def recv_into(self, view: memoryview) -> None:
        while len(view):
            view = view[self.recv_some(view, whole=True) :]

    def recv_some(self, view: memoryview, *, whole: bool = False) -> int:
        """Receive at least a byte into `view`. Returns how many. LinkError when the stream has ended.

        `whole`: wait for all of it, unless the stream ends or there is a time-out.
        """
        self._enter()
        try:
            if self._deadline is not None:
                self._socket.settimeout(self._left())
            while True:
                try:
                    got = self._socket.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
                    break
                except BlockingIOError:
                    self._end_if(is_dead)
            if got:
                self._flow.received += got
                if (now := time.monotonic()) > self._look_at:
                    self._look_at = now + _LOOK_S
                    self._end_if(is_deaf)
                return got
            raise self._ended()
        except (OSError, ValueError) as error:
            kind = self._kind_of_reset() if isinstance(error, ConnectionResetError) else LinkError
            raise kind(f"the link to {self.peer} broke while receiving: {error}") from None
        finally:
            self._leave()

    def has_input(self, seconds: float) -> bool:
        """Wait until there is something to receive, or the stream has ended. Returns False after `seconds`.

        LinkError when the deadline has passed.
        """
        self._enter()
        try:
            return _readable(self._socket, seconds if self._deadline is None else min(seconds, self._left()))
        except TimeoutError as error:
            raise LinkError(f"the link to {self.peer} broke while receiving: {error}") from None
        finally:
            self._leave()

    def count(self, sent: int = 0, received: int = 0) -> None:
        """Bytes of this connection that went another way are of its traffic too."""
        self._flow.sent += sent
        self._flow.received += received

    def send_at_once(self, data: bytes) -> None:
        """Send what the system takes without waiting; no error if it takes nothing: last words to a peer."""
        with contextlib.suppress(OSError, LinkError):
            self._enter()
            try:
                self._socket.send(data, socket.MSG_DONTWAIT)
            finally:
                self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise LinkError(f"the link to {self.peer} is closed")
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._closed and not self._users:
                self._end()

    def _end_if(self, lost: Callable[[socket.socket], bool]) -> None:
        if lost(self._socket):
            self._dead = True
            self._socket.shutdown(socket.SHUT_RDWR)  # for the other thread
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def _ended(self) -> LinkError:
        """The stream has ended: say whether the peer closed it. If not, the sending thread got the error."""
        if self._dead or state_of(self._socket)[0] == ENDED:
            return self._kind_of_reset()(f"the link to {self.peer} broke")
        return LinkClosed(f"{self.peer} closed the link")

    def _kind_of_reset(self) -> type[LinkError]:
        return LinkReset if state_of(self._socket)[1] <= _ANSWERED_S else LinkError

    def set_timeout(self, seconds: float | None) -> None:
        with contextlib.suppress(OSError):
            self._socket.settimeout(seconds)

    def set_deadline(self, seconds: float | None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.set_timeout(seconds)

    def _left(self) -> float:
        """Seconds until the deadline. TimeoutError (an OSError) when it has passed."""
        assert self._deadline is not None
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError("it took too long")
        return left

    def limit_in_flight(self, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # closed
            limit_received(self._socket, nbytes)

    def pace(self, rate: int) -> None:
        if self.lender is not None:
            self.lender.paced = bool(rate)
        unsent = min(max(rate // 100, 64 << 10), UNSENT_BYTES) if rate else UNSENT_BYTES  # 10 ms of a slow one
        with contextlib.suppress(OSError):  # closed
            set_pace(self._socket, rate)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)

    def share_port(self, part: float) -> None:
        with self._lock:
            if not self._closed:
                self._port.share(self, part)

    def sent(self) -> Sent | None:
        """What it has sent; None where the system does not say, or when it has ended."""
        return sent_of(self._socket)

    def finish(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._port.share(self, 0.0)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked in it; close alone does not
            if not self._users:
                self._end()

    def _end(self) -> None:
        if self.lender is not None:
            self.lender.close()
        self._socket.close()
        self._traffic.closed(self._flow)


class TcpListener:
    """A Listener over a listening socket.

    It keeps a spare file descriptor. Without a free one, a connection would neither be accepted nor refused, and its
    peer would wait in vain: so the listener accepts it with the spare one, closes it, and says so.
    """

    def __init__(self, sock: socket.socket, traffic: Traffic | None = None, port: Port | None = None) -> None:
        self._socket, self._traffic, self._port = sock, traffic or Traffic(), port or Port()
        self._closed = False
        self._spare: int | None = _descriptor()
        self._lock = threading.Lock()  # of the spare one
        self._lines = Sparingly(burst=1)
        host, port = sock.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def accept(self) -> TcpConnection:
        while True:
            try:
                sock, peer = self._accept()
            except OSError as error:
                raise LinkError(f"no longer listening at {self.address}: {error}") from None
            try:
                return TcpConnection(sock, f"{peer[0]}:{peer[1]}", self._traffic, port=self._port)
            except OSError:
                sock.close()  # the peer disconnected at once: go on listening

    def _accept(self) -> tuple[socket.socket, tuple[str, int]]:
        while True:
            try:
                return self._socket.accept()
            except OSError as error:
                if self._closed:
                    raise
                if error.errno in _FULL:
                    self._refuse_one()
                time.sleep(_PAUSE_S)  # also an error of a connection that is gone, or of the network: it passes

    def _refuse_one(self) -> None:
        """Use the spare descriptor to close the connection that waits first, if there is one.

        The system says that there are no descriptors before it looks whether anybody waits.
        """
        with self._lock:
            if not _readable(self._socket, 0.0):
                return
            if self._spare is not None:
                os.close(self._spare)
            try:
                sock, peer = self._socket.accept()
                sock.close()
                self._lines.warn(
                    f"no free file descriptors: turned away {peer[0]}; allow this process more (`ulimit -n`)"
                )
            except OSError:  # another thread was faster, or the listener is closed
                pass
            finally:
                self._spare = _descriptor()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            if self._spare is not None:
                os.close(self._spare)
            self._spare = None


class TcpTransport:
    """TCP between ``host:port`` addresses.

    `segment_bytes` limits TCP's segments in both directions of accepted connections; 0: what the links allow.

    Attributes:
        traffic: the bytes of its connections.
    """

    secure = False

    def __init__(self, segment_bytes: int = 0) -> None:
        self._segment_bytes, self.traffic, self._shared = segment_bytes, Traffic(), Port()

    def listen(self, address: str) -> TcpListener:
        host, port = split_address(address)
        sock, host = socket_for(host)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            choose_cubic(sock)  # accepted sockets inherit it, and it must be set before they exist
            if self._segment_bytes:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, self._segment_bytes)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"port {port} on {host} is in use by another process: choose another, or 0 for any free one"
                ) from None
            elsewhere = ": it is no address of this machine (0.0.0.0 listens at all of them)"
            hint = elsewhere * (error.errno == errno.EADDRNOTAVAIL)
            raise LinkError(f"cannot listen at {address}: {error}{hint}") from None
        return TcpListener(sock, self.traffic, self._shared)

    def connect(self, address: str, timeout: float) -> TcpConnection:
        host, port = split_address(address)
        try:
            sock = socket.create_connection((host, port), timeout=timeout)
        except (OSError, UnicodeError) as error:
            raise LinkError(f"nobody answers at {address}: {error}") from None
        try:
            sock.settimeout(None)
            return TcpConnection(sock, address, self.traffic, dialed=True, port=self._shared)
        except OSError as error:
            sock.close()
            raise LinkError(f"{address} was gone as soon as it had answered: {error}") from None

    def private(self, address: str) -> bool:
        host, _ = split_address(address)
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def _readable(sock: socket.socket, seconds: float) -> bool:
    """Wait until there is something to receive or to accept. Returns False after `seconds`."""
    waits = select.poll()
    waits.register(sock, select.POLLIN)
    return bool(waits.poll(1000 * seconds))


def _descriptor() -> int | None:
    """A file descriptor that reads nothing; None if there is none left."""
    with contextlib.suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY)
    return None


def _after(buffers: list[memoryview], sent: int) -> list[memoryview]:
    """What remains of these buffers after their first `sent` bytes."""
    left = []
    for buffer in buffers:
        skip = min(sent, len(buffer))
        sent -= skip
        if skip < len(buffer):
            left.append(buffer[skip:])
    return left


# ---- At which of this machine's addresses a process listens ----

EVERYWHERE = "[::]"  # all addresses of both families: a cluster may have the one, the other or both


def family_of(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family of the socket that listens at `host`, an address or a name without brackets, and where.

    ``::`` is all addresses of both families; on a system without IPv6 it is ``0.0.0.0``. See `both_families`.
    """
    if host == "::" and not socket.has_dualstack_ipv6():
        return socket.AF_INET, "0.0.0.0"
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), host


def both_families(sock: socket.socket, host: str) -> None:
    """Let a socket that will listen at ``::`` take connections of IPv4 too, whatever the system's default is."""
    if sock.family == socket.AF_INET6 and host == "::":
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def socket_for(host: str) -> tuple[socket.socket, str]:
    """Return a new TCP socket that can listen at `host`, and where it is to be bound: see `family_of`."""
    family, where = family_of(host)
    sock = socket.socket(family, socket.SOCK_STREAM)
    both_families(sock, where)
    return sock, where
