"""A member's link to the coordinator: joins, then hands every message that comes to one function."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from rallypoint.errors import LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Kind
from rallypoint.net.handshake import introduce
from rallypoint.net.messages import Message, Welcome, decode
from rallypoint.net.transport import Connection, Transport

JOIN_TIMEOUT_S = 30.0
_RETRY_S = 0.1


class CoordinatorLink:
    """Joins as `id` in the constructor (AccessDenied, LinkError); `start` begins to hand over messages.

    `on_message` and `on_lost` are called from the link's own thread; `on_lost` once, unless the link was closed here.
    """

    def __init__(
        self, *, transport: Transport, address: str, token: str, role: str, id: str,
        on_message: Callable[[Message], None], on_lost: Callable[[RallypointError], None], listening_at: str = "",
    ) -> None:  # fmt: skip
        connection = connect_patiently(transport, address, JOIN_TIMEOUT_S)
        try:
            host = socket.gethostname()
            self.welcome: Welcome = introduce(
                connection, token, role=role, id=id, host=host, address=listening_at
            )
        except BaseException:
            connection.close()
            raise
        self._channel = Channel(connection, "the coordinator")
        self._on_message, self._on_lost = on_message, on_lost
        self._closed = False
        self._thread = threading.Thread(target=self._receive_all, name="from the coordinator", daemon=True)

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message to the coordinator."""
        self._channel.send_message(message)

    def close(self) -> None:
        """Send what is queued, then end the link."""
        self._channel.flush(2.0)
        self._closed = True
        self._channel.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _receive_all(self) -> None:
        try:
            while True:
                header = self._channel.receive_header()
                if header.kind not in (Kind.CONTROL, Kind.REFUSE):
                    raise ProtocolError(f"a {header.kind.name} frame from the coordinator")
                self._on_message(decode(self._channel.receive_bytes(header)))
        except RallypointError as error:
            self._channel.connection.close()
            if not self._closed:
                self._on_lost(error)


def connect_patiently(transport: Transport, address: str, timeout: float) -> Connection:
    """Connect, trying again while nobody listens yet: members may be started in any order. LinkError in the end."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return transport.connect(address, timeout=max(0.1, deadline - time.monotonic()))
        except LinkError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)
