"""A transport within one process: bounded byte pipes between threads, with names instead of ports. For tests."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

from rallypoint.errors import AddressInUse, LinkClosed, LinkError
from rallypoint.net.transport import PLAIN, Secured

_PIPE_BYTES = 4 << 20


class _Pipe:
    """One direction of a stream. A writer waits while more than `_PIPE_BYTES` bytes are unread."""

    def __init__(self) -> None:
        self._chunks: deque[memoryview] = deque()
        self._size = 0
        self._ended = False
        self._changed = threading.Condition()

    def write(self, data: memoryview, timeout: float | None) -> None:
        with self._changed:
            room = self._ended or self._size < _PIPE_BYTES
            if not room and not self._changed.wait_for(lambda: self._ended or self._size < _PIPE_BYTES, timeout):
                raise LinkError("the peer reads nothing")
            if self._ended:
                raise LinkError("the link has ended")
            self._chunks.append(memoryview(bytes(data)))
            self._size += len(data)
            self._changed.notify_all()

    def read_some(self, view: memoryview, timeout: float | None) -> int:
        with self._changed:
            here = self._ended or self._size > 0
            if not here and not self._changed.wait_for(lambda: self._ended or self._size > 0, timeout):
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


class InprocConnection:
    """A Connection over two pipes."""

    secured: Secured = PLAIN

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, peer: str) -> None:
        self._incoming, self._outgoing, self._peer = incoming, outgoing, peer
        self._timeout: float | None = None
        self._deadline: float | None = None

    @property
    def peer(self) -> str:
        return self._peer

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self._outgoing.write(memoryview(head), self._timeout if self._deadline is None else self._left())
        if payload is not None and len(payload):
            self._outgoing.write(payload, self._timeout if self._deadline is None else self._left())

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

    def finish(self) -> None:
        self._outgoing.end()

    def close(self) -> None:
        self._outgoing.end()
        self._incoming.end(forget=True)


class InprocListener:
    """A Listener with a queue of connections."""

    def __init__(self, transport: InprocTransport, address: str) -> None:
        self._transport, self._address = transport, address
        self._waiting: deque[InprocConnection] = deque()
        self._closed = False
        self._changed = threading.Condition()

    @property
    def address(self) -> str:
        return self._address

    def accept(self) -> InprocConnection:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                raise LinkError(f"no longer listening at {self._address}")
            return self._waiting.popleft()

    def offer(self, connection: InprocConnection) -> None:
        """Queue a connection for `accept`. Called from the connecting thread."""
        with self._changed:
            if self._closed:
                raise LinkError(f"nobody answers at {self._address}")
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
        listener.offer(InprocConnection(incoming=there, outgoing=here, peer=f"a thread, for {address}"))
        return InprocConnection(incoming=here, outgoing=there, peer=address)

    def private(self, address: str) -> bool:
        return True

    def forget(self, listener: InprocListener) -> None:
        """A listener has closed: its name is free again."""
        with self._lock:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]
