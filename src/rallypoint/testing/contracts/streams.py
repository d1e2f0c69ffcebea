"""What tests do with connections: make one, send, receive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rallypoint.errors import LinkError
from rallypoint.net.transport import Connection, Listener, Transport
from rallypoint.testing.contracts.beside import PATIENCE_S, Beside


def connected(transport: Transport, listener: Listener) -> tuple[Connection, Connection]:
    """Both ends of a new connection that has been used: a transport may shake hands at its first use."""
    near = transport.connect(listener.address, PATIENCE_S)
    far = listener.accept()
    for end in (near, far):
        end.set_timeout(PATIENCE_S)  # a broken transport then fails the test instead of blocking it
    with Beside(lambda: near.send(b"?")) as asking:
        assert receive(far, 1) == b"?"
        asking.raise_if_failed()
    return near, far


def trickle(step: Callable[[], object], beside: Beside) -> None:
    """Make a little progress again and again, as long as the other thread runs."""
    while beside.is_running():
        with contextlib.suppress(LinkError):
            step()
        time.sleep(0.02)


def receive(connection: Connection, count: int) -> bytes:
    """Return the next `count` bytes of a connection."""
    room = bytearray(count)
    connection.recv_into(memoryview(room))
    return bytes(room)


def send_for_ever(connection: Connection) -> None:
    """Send until the connection raises. Blocks soon when nobody reads."""
    megabyte = memoryview(bytes(1 << 20))
    while True:
        connection.send(b"", megabyte)
