"""A connection that carries frames. One thread sends from a queue; the owner's thread receives."""

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

    `send` never blocks: it queues the frame. Urgent frames (credits, measures, control) go before bulk ones. Any thread
    may send; only one thread may receive. When the connection breaks, the sending thread ends quietly, and the
    receiving thread gets the LinkError. `number` counts accepted connections: of two channels, the one with the higher
    number is newer.
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
        """Queue a frame.

        `payload` must not change before `sent` is called, from the sending thread: after the frame went out, or when it
        never will. If the channel is closed, the frame is dropped and `sent` is called at once, from the calling
        thread.
        """
        with self._changed:
            if not self._closing:
                (self._urgent if urgent else self._bulk).append(_Outgoing(header, payload, sent))
                self._changed.notify_all()
                return
        if sent is not None:
            sent()

    def send_message(self, message: Message, kind: Kind = Kind.CONTROL) -> None:
        """Queue a control message, as an urgent frame."""
        data = encode(message)
        self.send(Header(kind, length=len(data)), memoryview(data), urgent=True)

    def refuse(self, reason: str, *, final: bool = False) -> None:
        """Tell the other side why this connection ends, then close the connection. `final`: see `Refused`."""
        data = encode(Refused(reason, final))
        self.send(Header(Kind.REFUSE, length=len(data)), memoryview(data), self.connection.close, urgent=True)

    def flush(self, timeout: float) -> bool:
        """Wait until every queued frame is sent, or the channel is closed. Returns False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._drained(), timeout)

    def close(self) -> None:
        """End the connection and the sending thread. Queued frames are dropped."""
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
            except LinkError:  # the receiving thread will get it too, after the last frames: they may say why
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
                self._changed.notify_all()  # for `flush`
                self._changed.wait_for(lambda: self._closing or self._urgent or self._bulk)
            if self._closing:
                return None
            self._idle = False
            return self._urgent.popleft() if self._urgent else self._bulk.popleft()

    # ---- receiving: one thread only ----

    def receive_header(self) -> Header:
        """Block until the next header is here. LinkError when the stream ends, ProtocolError if it is no header."""
        self.connection.recv_into(self._head)
        return unpack(self._head)

    def receive_into(self, view: memoryview) -> None:
        """Receive the payload of the last header into `view`. LinkError when the stream ends."""
        self.connection.recv_into(view)

    def receive_bytes(self, header: Header) -> bytearray:
        """Receive the payload of `header` into new memory (for small payloads). LinkError when the stream ends."""
        data = bytearray(header.length)
        if header.length:
            self.connection.recv_into(memoryview(data))
        return data
