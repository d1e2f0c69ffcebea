"""A coordinator's connections: it admits or refuses members, and turns their messages into events."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from rallypoint.coordinator import inbox
from rallypoint.coordinator.checks import Checks
from rallypoint.core.protocol import Hello, Refused, Welcome, expect
from rallypoint.errors import AccessDenied, CorruptFrame, LinkClosed, LinkError, LinkReset, ProtocolError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Identity
from rallypoint.net.keys import ROLES
from rallypoint.net.transport import Transport

MOST_WAITING = 64  # messages of one connection that wait for the owner: then it is not read until they are handled
_OWNER_S = 5.0  # the longest wait for the owner: it may have ended


class Connections:
    """Listens at `bind`, as `me`, as soon as it is constructed. Raises AddressInUse when another process listens there.

    `put(event)` and `refusal(hello)` are called on each connection's own thread. `refusal` returns why a member may not
    connect, "" if it may; it is then sent `welcome`.
    """

    def __init__(
        self, transport: Transport, bind: str, me: Identity, *, put: Callable[[inbox.Event | inbox.Barrier], None],
        refusal: Callable[[Hello], str], welcome: Welcome,
    ) -> None:  # fmt: skip
        self._put, self._refusal, self._welcome = put, refusal, welcome
        self._checks = Checks()
        self._gate = Gate(transport, bind, me, self._admit, self._serve)

    @property
    def address(self) -> str:
        """The address where it listens, "host:port"."""
        return self._gate.address

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._gate.close()

    def _admit(self, hello: Hello) -> Welcome:
        if hello.role not in ROLES:
            raise AccessDenied(f"there is no role {hello.role}")
        if why := self._refusal(hello):
            raise AccessDenied(why)
        return self._welcome

    def _serve(self, channel: Channel, hello: Hello) -> None:
        self._put(inbox.Opened(channel, hello))
        reason, how = "it closed its connection", inbox.End.CLOSED
        try:
            for number in itertools.count(1):
                header = channel.receive_header()
                if header.kind is Kind.REFUSE:  # it is there, and comes back: too much had waited to be read here
                    raise LinkError(expect(channel.receive_bytes(header), Refused).reason)
                if header.kind is not Kind.CONTROL:
                    raise ProtocolError(f"a {header.kind.name} frame from {hello.role} {hello.id}")
                self._put(inbox.Received(channel, hello, self._checks.checked(channel.receive_message(header), hello)))
                if number % MOST_WAITING == 0:
                    self._wait_for_owner()
        except CorruptFrame:
            reason, how = "a frame from it was changed on the way", inbox.End.LOST
            raise
        except LinkError as error:
            reason = "its connection ended"  # the error names its port, which tells a user nothing
            if not isinstance(error, LinkClosed):
                how = inbox.End.RESET if isinstance(error, LinkReset) else inbox.End.LOST
            raise
        except ProtocolError as error:
            reason = f"it broke the protocol: {error}"
            raise
        finally:
            self._put(inbox.Closed(channel, hello, reason, how))

    def _wait_for_owner(self) -> None:
        """Block until the owner has handled what was put before: one peer fills neither the memory nor the time."""
        handled = threading.Event()
        self._put(inbox.Barrier(handled.set))
        handled.wait(_OWNER_S)
