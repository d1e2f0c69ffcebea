"""The link from a worker to one server: pushes go out under a credit window, versions come in to where they belong."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rallypoint.core.view import Member, ViewNumber
from rallypoint.errors import AccessDenied, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import introduce
from rallypoint.net.messages import Refused, expect
from rallypoint.net.transport import Transport
from rallypoint.observe.trace import Tracer

CONNECT_TIMEOUT_S = 10.0


class Arrivals(Protocol):
    """Where versions go: the exchange."""

    def arriving(self, shard: int, version: int, nbytes: int) -> memoryview | None:
        """The bytes to receive this version into; None to read and forget it. ProtocolError if it cannot be."""

    def landed(self, shard: int) -> None:
        """The version that `arriving` made room for is whole."""


class ServerLink:
    """Connects in the constructor (LinkError, AccessDenied); `start` begins to receive.

    At most `window` contributions are on their way without the server's credit: that bounds the server's memory, and
    keeps many workers from flooding one server's switch port at once (incast). `on_lost` is called once, from the
    link's thread, unless the link was closed here.
    """

    def __init__(
        self, *, transport: Transport, server: Member, me: str, token: str, window: int,
        arrivals: Arrivals, on_lost: Callable[[RallypointError], None], tracer: Tracer,
    ) -> None:  # fmt: skip
        connection = transport.connect(server.address, CONNECT_TIMEOUT_S)
        try:
            introduce(connection, token, role="worker", id=me, host=socket.gethostname())
        except BaseException:
            connection.close()
            raise
        self.server = server
        self._channel = Channel(connection, server.id, tracer)
        self._arrivals, self._on_lost, self._tracer = arrivals, on_lost, tracer
        self._credits = window
        self._waiting: deque[tuple[Header, memoryview, Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._scratch = memoryview(b"")
        self._closed = False
        self._thread = threading.Thread(target=self._receive_all, name=f"from {server.id}", daemon=True)

    def start(self, number: ViewNumber) -> None:
        """Begin to receive: every shard's newest version, and each one that follows."""
        self._thread.start()
        self._channel.send(Header(Kind.FOLLOW, number), urgent=True)

    def push(self, header: Header, payload: memoryview, sent: Callable[[], None]) -> None:
        """Queue a contribution; `sent` is called when its bytes may be reused."""
        with self._lock:
            if self._credits == 0:
                self._waiting.append((header, payload, sent))
                return
            self._credits -= 1
        self._channel.send(header, payload, sent)

    def fetch(self, shard: int, version: int, number: ViewNumber) -> None:
        """Ask for one version again."""
        self._channel.send(Header(Kind.FETCH, number, shard=shard, step=version), urgent=True)

    def close(self) -> None:
        """End the link and its threads."""
        self._closed = True
        self._channel.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _receive_all(self) -> None:
        try:
            while True:
                self._receive(self._channel.receive_header())
        except RallypointError as error:
            self._channel.connection.close()
            if not self._closed:
                self._on_lost(error)

    def _receive(self, header: Header) -> None:
        match header.kind:
            case Kind.VERSION:
                self._receive_version(header)
            case Kind.CREDIT:
                self._credit(header.replica)
            case Kind.REFUSE:
                reason = expect(self._channel.receive_bytes(header), Refused).reason
                raise AccessDenied(f"server {self.server.id} ({self.server.address}) ended the link: {reason}")
            case _:
                raise ProtocolError(f"a {header.kind.name} frame from server {self.server.id}")

    def _receive_version(self, header: Header) -> None:
        place = self._arrivals.arriving(header.shard, header.step, header.length)
        if place is None:
            if len(self._scratch) < header.length:
                self._scratch = memoryview(bytearray(header.length))
            self._channel.receive_into(self._scratch[: header.length])
            return
        with self._tracer.span("pull", shard=header.shard, version=header.step):
            self._channel.receive_into(place)
        self._arrivals.landed(header.shard)

    def _credit(self, count: int) -> None:
        for _ in range(count):
            with self._lock:
                if not self._waiting:
                    self._credits += 1
                    continue
                header, payload, sent = self._waiting.popleft()
            self._channel.send(header, payload, sent)
