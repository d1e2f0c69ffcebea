"""The listening side of a role: accepts connections, checks the token, serves each in its own thread."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable

from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.handshake import check_exposure, greet, refuse, welcome
from rallypoint.net.messages import Hello, Welcome
from rallypoint.net.transport import Connection, Transport
from rallypoint.observe.trace import Tracer

log = logging.getLogger("rallypoint")


class Gate:
    """Listens at `bind` until closed. UsageError if other machines can reach `bind` and the token is too short.

    `admit` gets a Hello whose token was right. It returns the Welcome, or raises RallypointError to refuse. Then
    `serve` runs in the connection's own thread until it returns or raises. A ProtocolError closes only that connection,
    with a sentence to both sides (I9).
    """

    def __init__(
        self, transport: Transport, bind: str, token: str,
        admit: Callable[[Hello], Welcome], serve: Callable[[Channel, Hello], None], tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        check_exposure(transport, bind, token)
        self._listener = transport.listen(bind)
        self.address = self._listener.address
        self._token, self._admit, self._serve, self._tracer = token, admit, serve, tracer
        self._open: dict[Connection, threading.Thread] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept_all, name="accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, close every connection, join every thread."""
        with self._lock:
            self._closed = True
            threads = dict(self._open)
        self._listener.close()
        for connection in threads:
            connection.close()
        for thread in (self._thread, *threads.values()):
            if thread is not threading.current_thread():
                thread.join()

    def _accept_all(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except LinkError:
                return
            thread = threading.Thread(
                target=self._run, args=(connection, next(self._numbers)), name=f"from {connection.peer}", daemon=True
            )
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                thread.start()  # under the lock, so that `close` never joins a thread that has not started
                self._open[connection] = thread

    def _run(self, connection: Connection, number: int) -> None:
        try:
            self._greet_and_serve(connection, number)
        except LinkError as error:
            log.debug("%s", error)
        except (ProtocolError, AccessDenied) as error:
            log.warning("closed the connection from %s: %s", connection.peer, error)
        finally:
            connection.close()
            with self._lock:
                self._open.pop(connection, None)

    def _greet_and_serve(self, connection: Connection, number: int) -> None:
        hello = greet(connection, self._token)
        try:
            answer = self._admit(hello)
        except RallypointError as error:
            refuse(connection, str(error))
            raise AccessDenied(f"refused {hello.role} {hello.id}: {error}") from None
        welcome(connection, answer)
        channel = Channel(connection, hello.id, self._tracer, number)
        try:
            self._serve(channel, hello)
        except ProtocolError as error:
            channel.refuse(str(error))
            channel.flush(1.0)
            raise
        finally:
            channel.close()
