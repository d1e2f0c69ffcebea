"""Transports: reliable, ordered byte streams between addresses; and the one within a process."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rallypoint.errors import AddressInUse, LinkClosed, LinkError

# ---- The interface of a transport: reliable, ordered byte streams between addresses ----
#
# `tcp.py` implements it with TCP, `tls.py` with TLS over TCP, `InprocTransport` within one process.


@dataclass(frozen=True, slots=True)
class Secured:
    """What TLS has proved about a connection. Without TLS: nothing.

    Attributes:
        role: the role that the other side's certificate names; "" without TLS.
        binding: a digest of this very connection: both sides have the same, and nobody else has it, not even one with
            the same certificates; b"" without TLS.
    """

    role: str = ""
    binding: bytes = b""


PLAIN = Secured()
LEAST_LENT = 16 << 10  # bytes; a shorter payload is sent


class Lender(Protocol):
    """One end of a connection between two members that can read each other's memory: a payload stays where it is.

    The other end reads each payload once, in the order in which they were lent. One thread lends, another one reads.
    """

    def lend(self, payload: memoryview) -> int | None:
        """Let the other end read this payload. Returns its number; None if it must be sent."""

    def read(self, number: int, view: memoryview) -> None:
        """Copy what the other end lends under this number into `view`. LinkError if it is lent no more."""

    def returned(self) -> int:
        """How many payloads the other end has read so far."""

    def withdraw(self) -> None:
        """From now on nothing is lent. What is being read at this moment gets a LinkError there."""


class Connection(Protocol):
    """One byte stream in both directions. One thread may send while another one receives.

    With TLS the two sides shake hands when it is first used. So the first send, too, waits for the other side's first
    send or receive.
    """

    @property
    def peer(self) -> str:
        """The name of the other side, for messages."""

    @property
    def secured(self) -> Secured:
        """What TLS has proved. Blocks until it has. UnprovenPeer (dialer), AccessDenied (listener) if it cannot."""

    @property
    def lender(self) -> Lender | None:
        """What lends payloads to the other side; None if they must be sent. It is final once the greeting is over."""

    @property
    def offers(self) -> str:
        """The name, with its version, of a better way for large payloads; "" if it has none.

        If both sides name the same in the greeting, both call `upgrade` at the same point of the stream.
        """

    def upgrade(self, sending: bytes, receiving: bytes) -> None:
        """Use that way from here on, if it works; blocks until both sides know. The keys are this side's, of 32 bytes.

        LinkError when the stream ends, or what comes was changed on its way.
        """

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        """Send `head`, then `payload`, completely; blocks until they are sent. LinkError when the stream has ended."""

    def recv_into(self, view: memoryview) -> None:
        """Block until `view` is filled completely. LinkError when the stream ends first."""

    def set_timeout(self, seconds: float | None) -> None:
        """From now on, a send or receive without progress for `seconds` raises LinkError. None: no limit."""

    def set_deadline(self, seconds: float | None) -> None:
        """Limit the total time: sends and receives raise LinkError from `seconds` after now. None: no limit.

        Unlike with `set_timeout`, a peer cannot extend it by sending a byte now and then.
        """

    def limit_in_flight(self, nbytes: int) -> None:
        """From now on, buffer only about `nbytes` received bytes here; the other side waits when the buffer is full. 0:
        as many as the system likes, as before the first call."""

    def pace(self, rate: int) -> None:
        """From now on, send at most `rate` bytes a second; 0: as fast as the other side takes them. A system that
        cannot do that does nothing."""

    def share_port(self, part: float) -> None:
        """From now on this connection gets `part` (0 to 1) of what this process's port is measured to carry: it is
        paced. With 0 it shares the port no more, and is not paced. A system that cannot do that does nothing."""

    def finish(self) -> None:
        """Send no more. What was sent still arrives, and then the other side sees the end; receiving goes on."""

    def close(self) -> None:
        """End the stream in both directions. Any thread may call it, more than once. What was sent last may be lost.

        A thread that is blocked in `send` or `recv_into` gets a LinkError.
        """


class Listener(Protocol):
    """Accepts connections at one address."""

    @property
    def address(self) -> str:
        """The address to pass to `connect`."""

    def accept(self) -> Connection:
        """Block until the next connection arrives, and return it. LinkError once the listener is closed."""

    def close(self) -> None:
        """Stop listening. May be called more than once. A blocked `accept` gets a LinkError."""


class Transport(Protocol):
    """Makes byte streams between addresses."""

    @property
    def secure(self) -> bool:
        """Do its connections encrypt, and prove the role of the other side?"""

    def listen(self, address: str) -> Listener:
        """Listen at `address`. AddressInUse if another listener has it."""

    def connect(self, address: str, timeout: float) -> Connection:
        """Connect to `address`. LinkError if nobody answers within `timeout` seconds."""

    def private(self, address: str) -> bool:
        """Is `address` reachable only from this machine (or this process)?"""


FIRST_PIECE = 1 << 20  # bytes; most payloads are not longer


def receive_bytes(connection: Connection, count: int, first_piece: int = FIRST_PIECE) -> bytearray:
    """Receive `count` bytes into new memory. LinkError when the stream ends first.

    The memory grows as the bytes come, at most to twice what has come: a length that nothing follows costs no more than
    `first_piece` bytes.
    """
    data, filled = bytearray(min(count, first_piece)), 0
    while filled < count:
        with memoryview(data) as whole, whole[filled:] as rest:
            connection.recv_into(rest)
        filled = len(data)
        data += bytes(min(count - filled, filled))
    return data


LEAST_IN_FLIGHT = 16 << 10  # bytes; with less, a link would wait after every packet
LEAST_PACE = 16 << 10  # bytes a second


class Limits(NamedTuple):
    """How much a machine's links may carry, or one of them (`shared`): `in_flight` bytes to the machine at once, and
    `pace` bytes a second from it; or `part` of what its port is measured to carry. 0: no limit."""

    in_flight: int = 0
    pace: int = 0
    part: float = 0.0

    @classmethod
    def of(cls, in_flight: int, pace_mbit: float, *, measured: bool = False) -> Limits:
        """Those of a whole machine, with the pace in Mbit/s; with 0 the port is `measured`, or nothing is paced."""
        return cls(in_flight, round(pace_mbit * 1e6 / 8), float(measured and not pace_mbit))

    def shared(self, links: int, part: float | None = None) -> Limits:
        """The share of each of `links` links; one that carries another `part` of all bytes gets that of the port."""
        links = max(1, links)
        in_flight = max(LEAST_IN_FLIGHT, self.in_flight // links) if self.in_flight else 0
        pace = max(LEAST_PACE, self.pace // links) if self.pace else 0
        return Limits(in_flight, pace, self.part * (1 / links if part is None else part))

    def set_on(self, connection: Connection, before: Limits | None = None) -> None:
        """Set them on a connection on which `before` are set (None: it is new)."""
        if self.in_flight != (0 if before is None else before.in_flight):
            connection.limit_in_flight(self.in_flight)
        changed = self.part != (0.0 if before is None else before.part)
        if changed and not self.part:
            connection.share_port(0.0)
        if self.pace != (0 if before is None else before.pace):
            connection.pace(self.pace)
        if changed and self.part:  # last: a port that is known paces at once
            connection.share_port(self.part)


# ---- A transport within one process, for tests: bounded byte pipes, with names instead of ports ----

_PIPE_BYTES = 4 << 20


class _Pipe:
    """One direction of a stream. A writer waits while more than `_PIPE_BYTES` bytes are unread."""

    def __init__(self) -> None:
        self._chunks: deque[memoryview] = deque()
        self._size = 0
        self._ended = False
        self._changed = threading.Condition()

    def write(self, head: bytes, payload: memoryview | None, timeout: float | None) -> None:
        with self._changed:
            room = self._ended or self._size < _PIPE_BYTES
            if not room and not self._changed.wait_for(lambda: self._ended or self._size < _PIPE_BYTES, timeout):
                raise LinkError("the peer reads nothing")
            if self._ended:
                raise LinkError("the link has ended")
            for data in (head, payload):
                if data is not None and len(data):
                    self._chunks.append(memoryview(bytes(data)))
                    self._size += len(data)
            self._changed.notify_all()

    def read_some(self, view: memoryview, timeout: float | None) -> int:
        with self._changed:
            while not (self._ended or self._size):
                if not self._changed.wait(timeout) and not (self._ended or self._size):
                    raise LinkError("the peer sends nothing")
            if self._size == 0:
                raise LinkClosed("the link has ended")
            chunk = self._chunks.popleft()
            count = min(len(chunk), len(view))
            view[:count] = chunk[:count]
            if count < len(chunk):
                self._chunks.appendleft(chunk[count:])
            self._size -= count
            self._changed.notify_all()
            return count

    def end(self, *, forget: bool = False) -> None:
        with self._changed:
            self._ended = True
            if forget:
                self._chunks.clear()
                self._size = 0
            self._changed.notify_all()


class _Lent:
    """Payloads that one end of a connection lends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # nothing is withdrawn while it is read
        self.payloads: dict[int, memoryview] = {}
        self.lent = self.read = 0


class InprocLender:
    """A Lender within one process."""

    def __init__(self, mine: _Lent, theirs: _Lent) -> None:
        self._mine, self._theirs = mine, theirs

    def lend(self, payload: memoryview) -> int | None:
        if len(payload) < LEAST_LENT:
            return None
        with self._mine.lock:
            self._mine.lent += 1
            self._mine.payloads[self._mine.lent] = payload
            return self._mine.lent

    def read(self, number: int, view: memoryview) -> None:
        with self._theirs.lock:
            if (payload := self._theirs.payloads.pop(number, None)) is None or len(payload) != len(view):
                raise LinkError("a payload is lent no more")
            try:
                there, here = ctypes.c_char.from_buffer(payload), ctypes.c_char.from_buffer(view)
                ctypes.memmove(ctypes.byref(here), ctypes.byref(there), len(view))  # lets Python's lock go
            except TypeError:  # memory that nobody may write
                view[:] = payload
            self._theirs.read += 1

    def returned(self) -> int:
        return self._mine.read

    def withdraw(self) -> None:
        with self._mine.lock:
            self._mine.payloads.clear()


class InprocConnection:
    """A Connection over two pipes."""

    secured: Secured = PLAIN
    offers = ""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, peer: str, lender: Lender | None = None) -> None:
        self._incoming, self._outgoing, self.peer = incoming, outgoing, peer
        self.lender = lender
        self._timeout: float | None = None
        self._deadline: float | None = None

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self._outgoing.write(head, payload, self._timeout if self._deadline is None else self._left())

    def recv_into(self, view: memoryview) -> None:
        while len(view):
            patience = self._timeout if self._deadline is None else self._left()
            view = view[self._incoming.read_some(view, patience) :]

    def _left(self) -> float:
        """The seconds until the deadline. LinkError when it has passed."""
        assert self._deadline is not None
        if (left := self._deadline - time.monotonic()) <= 0:
            raise LinkError("it took too long")
        return left

    def set_timeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def set_deadline(self, seconds: float | None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def limit_in_flight(self, nbytes: int) -> None:
        """Does nothing: no bytes are in flight."""

    def pace(self, rate: int) -> None:
        """Does nothing."""

    def share_port(self, part: float) -> None:
        """Does nothing."""

    def upgrade(self, sending: bytes, receiving: bytes) -> None:
        """Does nothing: it lends from the start."""

    def finish(self) -> None:
        self._outgoing.end()

    def close(self) -> None:
        self._outgoing.end()
        self._incoming.end(forget=True)


class InprocListener:
    """A Listener with a queue of connections."""

    def __init__(self, transport: InprocTransport, address: str) -> None:
        self._transport, self.address = transport, address
        self._waiting: deque[InprocConnection] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def accept(self) -> InprocConnection:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                raise LinkError(f"no longer listening at {self.address}")
            return self._waiting.popleft()

    def offer(self, connection: InprocConnection) -> None:
        """Queue a connection for `accept`. Called from the connecting thread."""
        with self._changed:
            if self._closed:
                raise LinkError(f"nobody answers at {self.address}")
            self._waiting.append(connection)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for connection in self._waiting:
                connection.close()
            self._changed.notify_all()
        self._transport.forget(self)


class InprocTransport:
    """A private network: two instances do not share addresses."""

    secure = False

    def __init__(self) -> None:
        self._listeners: dict[str, InprocListener] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def listen(self, address: str) -> InprocListener:
        """Listen at a name. A name that ends in ``:0`` gets a free number. AddressInUse if the name is taken."""
        with self._lock:
            if address.endswith(":0"):
                address = f"{address[:-2]}:{next(self._numbers)}"
            if address in self._listeners:
                raise AddressInUse(f"the name {address} is in use: choose another, or end it in :0 for any free one")
            listener = self._listeners[address] = InprocListener(self, address)
            return listener

    def connect(self, address: str, timeout: float) -> InprocConnection:
        with self._lock:
            listener = self._listeners.get(address)
        if listener is None:
            raise LinkError(f"nobody answers at {address}")
        here, there = _Pipe(), _Pipe()
        mine, theirs = _Lent(), _Lent()
        listener.offer(InprocConnection(there, here, f"a thread, for {address}", InprocLender(theirs, mine)))
        return InprocConnection(here, there, address, InprocLender(mine, theirs))

    def private(self, address: str) -> bool:
        return True

    def forget(self, listener: InprocListener) -> None:
        """A listener has closed: its name is free again."""
        with self._lock:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]
