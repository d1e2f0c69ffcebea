"""A connection that speaks frames: one thread sends from a queue, one thread (the owner's) receives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rallypoint.errors import LinkError
from rallypoint.net.frames import HEADER_BYTES, Header, Kind, pack, unpack
from rallypoint.net.messages import Message, Refused, encode
from rallypoint.net.transport import Connection
from rallypoint.observe.trace import Tracer


class _Outgoing(NamedTuple):
    header: Header
    payload: memoryview | None
    sent: Callable[[], None] | None


class Channel:
    """Frames over one connection.

    `send` never blocks: it queues, urgent frames (credits, measures, control) ahead of bulk ones. The sending thread
    ends with the connection; the loss itself is reported to whoever receives. `number` says, of one that was accepted,
    in which order it was.
    """

    def __init__(self, connection: Connection, name: str, tracer: Tracer | None = None, number: int = 0) -> None:
        self.connection = connection
        self.name, self.number = name, number
        self._tracer = tracer or Tracer(name)
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._urgent: deque[_Outgoing] = deque()
        self._bulk: deque[_Outgoing] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._idle = True
        self._thread = threading.Thread(target=self._send_all, name=f"send to {name}", daemon=True)
        self._thread.start()

    # ---- sending ----

    def send(
        self, header: Header, payload: memoryview | None = None, sent: Callable[[], None] | None = None,
        *, urgent: bool = False,
    ) -> None:  # fmt: skip
        """Queue a frame. `sent` is called, from the sending thread, when its bytes may be reused (also on failure)."""
        with self._changed:
            if not self._closing:
                (self._urgent if urgent else self._bulk).append(_Outgoing(header, payload, sent))
                self._changed.notify_all()
                return
        if sent is not None:
            sent()

    def send_message(self, message: Message, kind: Kind = Kind.CONTROL) -> None:
        """Queue a control message."""
        data = encode(message)
        self.send(Header(kind, length=len(data)), memoryview(data), urgent=True)

    def refuse(self, reason: str, *, final: bool = False) -> None:
        """Tell the other side why this connection ends, and end it once that is sent; see `Refused`."""
        data = encode(Refused(reason, final))
        self.send(Header(Kind.REFUSE, length=len(data)), memoryview(data), self.connection.close, urgent=True)

    def flush(self, timeout: float) -> bool:
        """Wait until everything queued has been sent; False when `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._drained(), timeout)

    def close(self) -> None:
        """End the connection and the sending thread; what is queued is let go."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _drained(self) -> bool:
        return self._idle and not self._urgent and not self._bulk

    def _send_all(self) -> None:
        while (item := self._next()) is not None:
            try:
                with self._tracer.span("send", kind=item.header.kind.name, shard=item.header.shard):
                    self.connection.send(pack(item.header), item.payload)
            except LinkError:  # the receiver will find out too, after what has arrived: it may say why
                with self._changed:
                    self._closing = True
                    self._changed.notify_all()
            if item.sent is not None:
                item.sent()
        for item in (*self._urgent, *self._bulk):
            if item.sent is not None:
                item.sent()

    def _next(self) -> _Outgoing | None:
        with self._changed:
            if not (self._closing or self._urgent or self._bulk):
                self._idle = True
                self._changed.notify_all()  # whoever flushes
                self._changed.wait_for(lambda: self._closing or self._urgent or self._bulk)
            if self._closing:
                return None
            self._idle = False
            return self._urgent.popleft() if self._urgent else self._bulk.popleft()

    # ---- receiving: one thread only ----

    def receive_header(self) -> Header:
        """The next frame's header. LinkError when the stream ends, ProtocolError when it is not a header."""
        self.connection.recv_into(self._head)
        return unpack(self._head)

    def receive_into(self, view: memoryview) -> None:
        """The payload of the frame whose header was just received."""
        self.connection.recv_into(view)

    def receive_bytes(self, header: Header) -> bytearray:
        """The payload as fresh bytes (control messages; the header's limit has been checked)."""
        data = bytearray(header.length)
        if header.length:
            self.connection.recv_into(memoryview(data))
        return data
