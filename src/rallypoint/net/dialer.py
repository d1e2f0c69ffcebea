"""Keeps a connection to a peer: connects again whenever it is lost."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rallypoint.core.view import Member, ViewNumber
from rallypoint.errors import CorruptFrame, LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.handshake import Credentials, introduce
from rallypoint.net.transport import Connection, Transport
from rallypoint.observe.trace import Tracer

log = logging.getLogger("rallypoint")

CONNECT_TIMEOUT_S = 2.0
_HOLDS_S = 6.0  # a connection that lasts so long carries data; TCP notices after 3 s that one does not
_FLAPS = 2  # so many connections in a row that do not last: the peer cannot be reached although it answers
_PAUSES_S = (0.02, 0.05, 0.1, 0.2, 0.5)  # between attempts; also after a connection that breaks at once


@dataclass(frozen=True, slots=True)
class Calls:
    """The functions that a dialer calls, all from its own thread: for each connection `up`, then `serve`, then `down`.

    Attributes:
        view: returns the newest view that this process knows. The other side waits until it knows that view too.
        up: the connection is up.
        serve: receives from the connection until it raises.
        down: called with the error that `serve` raised. The channel's sending thread has ended by then.
        failed: called once, last, with an exception that is no error of a connection: a fault in `down`, or while
            dialing. The dialer has ended: it cannot know in what state it has left its owner.
    """

    view: Callable[[], ViewNumber]
    up: Callable[[Channel], None]
    serve: Callable[[Channel], None]
    down: Callable[[RallypointError], None]
    failed: Callable[[Exception], None]


def dialer_over(transport: Transport, **how: Any) -> Dialer:
    """A dialer over this transport: its own, if it has no threads; see `Dialer`."""
    made: Dialer = getattr(transport, "dialer", Dialer)(transport=transport, **how)
    return made


class Dialer:
    """Keeps a channel to `peer`, a server or an aggregator, in its own thread, from `start` to `close`.

    It proves itself with `credentials`, as they are at each attempt.

        connecting, handshake  -- up, serve, down -->  connecting, handshake  -- close -->  closed

    `close` waits for calls only: after a host's death an attempt to connect takes seconds, and cannot be cut short.
    """

    def __init__(
        self, *, transport: Transport, peer: Member, credentials: Credentials, calls: Calls, tracer: Tracer
    ) -> None:
        self.peer = peer
        self._transport, self._credentials, self._calls, self._tracer = transport, credentials, calls, tracer
        self._closed = threading.Event()
        self._state = threading.Condition()
        self._calling = False
        self._connection: Connection | None = None  # set before the handshake, so that `close` can end it
        self.trouble = ""  # why there is no connection now; empty if there is one
        self._lost_at, self._up_at = time.monotonic(), 0.0  # `_up_at` is 0.0 while there is no connection
        self._short = 0  # connections in a row that did not hold
        self._thread = threading.Thread(target=self._run, name=f"link to {peer.id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def unreachable(self) -> float:
        """Seconds for which the peer could not be reached. 0.0 while there is a connection, unless none holds."""
        if self._up_at and (self._short < _FLAPS or time.monotonic() - self._up_at > _HOLDS_S):
            return 0.0
        return time.monotonic() - self._lost_at

    def close(self) -> None:
        """End the connection. When this returns, none of `calls` runs or will run, but perhaps `view`.

        The thread may live on for a moment: until its attempt to connect is over.
        """
        with self._state:
            self._closed.set()
        if (connection := self._connection) is not None:
            connection.close()
        if self._thread is not threading.current_thread():
            with self._state:
                self._state.wait_for(lambda: not self._calling)

    @contextlib.contextmanager
    def _may_call(self) -> Iterator[bool]:
        """True if `close` has not been called; then it waits for the end of the body."""
        with self._state:
            self._calling = not self._closed.is_set()
        try:
            yield self._calling
        finally:
            with self._state:
                self._calling = False
                self._state.notify_all()

    def _run(self) -> None:
        try:
            self._connect_again_and_again()
        except Exception as fault:  # else this thread would end unseen while others wait for its frames
            log.error("the link to %s has failed", self.peer.id, exc_info=fault)
            self.trouble = f"it has failed: {fault!r}"
            with self._may_call() as may_call:
                if may_call:
                    self._calls.failed(fault)

    def _connect_again_and_again(self) -> None:
        tries = 0
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                channel = self._dial()
            except RallypointError as error:
                self.trouble = str(error)
            else:
                with self._may_call() as may_call:
                    self._keep(channel) if may_call else channel.close()
                if time.monotonic() - began > _PAUSES_S[-1]:
                    tries = 0  # the connection lasted: connect again at once
                    continue
            self._closed.wait(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1

    def _dial(self) -> Channel:
        connection = self._connection = self._transport.connect(self.peer.address, CONNECT_TIMEOUT_S)
        if self._closed.is_set():
            connection.close()  # `close` came before the connection existed
        try:
            hello, ticket = self._credentials.hello(self.peer, socket.gethostname(), self._calls.view())
            _, keys = introduce(connection, hello, ticket=ticket)
        except BaseException:
            connection.close()
            raise
        return Channel(connection, self.peer.id, keys, self._tracer)

    def _keep(self, channel: Channel) -> None:
        error: RallypointError = LinkError("the link was closed")
        self.trouble = ""
        self._up_at = up_at = time.monotonic()
        try:
            self._calls.up(channel)
            self._calls.serve(channel)
        except RallypointError as lost:
            error = lost
            if isinstance(lost, CorruptFrame):
                log.warning("%s; connecting again", lost)
        except Exception as fault:  # else this thread would end silently while others wait for its frames
            log.error("the link to %s has failed", self.peer.id, exc_info=fault)
            error = ProtocolError(f"what {self.peer.id} sent could not be taken: {fault!r}")
        lost_at = time.monotonic()
        held = lost_at - up_at > _HOLDS_S
        if held or not self._short:
            self._lost_at = lost_at
        self._short = 0 if held else self._short + 1
        self._up_at = 0.0  # last: from here on another thread counts from `_lost_at`
        channel.close()  # also ends its sending thread, so the queued payloads are released
        self.trouble = str(error)
        if not self._closed.is_set():
            self._calls.down(error)
