"""A coordinator's connections: it admits or refuses members, and turns their messages into events."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import get_args

import msgspec

from rallypoint.config import JobConfig, parse, record_of
from rallypoint.config.keys import GROUPS
from rallypoint.coordinator import inbox
from rallypoint.core import protocol as said
from rallypoint.core.protocol import Beat, Hello, Message, Propose, Refused, Report, Resize, Welcome, expect
from rallypoint.errors import AccessDenied, ConfigError, CorruptFrame, LinkClosed, LinkError, LinkReset, ProtocolError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import ROLES, Identity
from rallypoint.net.transport import Transport

# ---- Checks which messages the coordinator accepts, and from which role ----

MOST = 10_000  # the most workers or servers that a `Resize` may ask for, or a `Beat` may name
MOST_THREADS = 1 << 16  # as in `Welcome`
_AGE_S = 1e9  # no wait is longer

_MAY_SAY: dict[str, tuple[type, ...]] = {
    "worker": (
        *(said.Knows, Propose, Beat, Report, said.Leaving, said.Stored, said.NotStored, said.Say, said.Stop),
        *(said.Done, said.GiveUp),
        *(said.Evaluates, said.Evaluated, said.Contributed, said.Sampled, said.ScriptAt, said.Reached),
    ),
    "server": (
        *(said.Knows, Beat, said.Applied, said.Accounted, said.CaughtUp, said.Disproved, said.Leaving, said.Stored),
        *(said.NotStored, said.Skipped, said.Say, said.GiveUp),
        *(said.Updated, said.AuditFound, said.Sampled, said.Unrestored),
    ),
    "aggregator": (said.Knows, Beat, said.Say, said.Sampled),
    "observer": (said.SnapshotWanted, Resize, said.Release, *get_args(said.AnyOrder)),
}


class Checks:
    """Checks what members send. Any thread may call it.

    All workers of a job propose the same record, and checking one takes milliseconds: one that has the same bytes as
    the last that was sound is not checked again.
    """

    def __init__(self) -> None:
        self._sound = b""

    def checked(self, message: Message, sender: Hello) -> Message:
        """Return `message`. Raises ProtocolError if its sender's role may not send it, or its values make no sense."""
        if not isinstance(message, Propose) or sender.role != "worker":
            return checked(message, sender)
        proposed = msgspec.msgpack.encode(message.record)
        if proposed != self._sound:
            checked(message, sender)
            self._sound = proposed
        return message


def checked(message: Message, sender: Hello) -> Message:
    """Return `message`. Raises ProtocolError if its sender's role may not send it, or its values make no sense."""
    if not isinstance(message, _MAY_SAY[sender.role]):
        raise ProtocolError(f"a {type(message).__name__} message from {sender.role} {sender.id}")
    if isinstance(message, Report) and not (
        message.weight > 0 and math.isfinite(message.weight) and math.isfinite(message.seconds)
    ):
        raise ProtocolError(f"a report of weight {message.weight} after {message.seconds} s")
    if isinstance(message, Beat):
        seconds = (message.waited, *message.unreachable.values())
        if len(seconds) > MOST or not all(0 <= one <= _AGE_S for one in seconds) or not 0 <= message.activity < 2**63:
            raise ProtocolError(f"a beat with {len(seconds)} waits that cannot be: {max(seconds)} s")
    if isinstance(message, Resize) and not (0 <= message.workers <= MOST and 0 <= message.servers <= MOST):
        raise ProtocolError(f"a wish for {message.workers} workers and {message.servers} servers")
    if isinstance(message, Propose):
        config = message.record.config
        missing = set(JobConfig.__struct_fields__) - config.keys()
        for group, kind in GROUPS.items():
            part = config.get(group)
            missing |= {
                f"{group}.{name}" for name in kind.__struct_fields__ if not isinstance(part, dict) or name not in part
            }
        if missing:
            raise ProtocolError(f"a job record whose settings are not resolved: {min(missing)} is missing")
        try:
            record = message.record
            resolved = record_of(
                parse(config), record.layout, record.frozen, data=record.data, tied=record.tied, threads=record.threads
            )
        except ConfigError as error:
            raise ProtocolError(str(error)) from None
        if not 0 <= record.threads <= MOST_THREADS:
            raise ProtocolError(f"a job record of {record.threads} intra-op threads")
        if msgspec.structs.replace(resolved, config=config) != message.record:
            raise ProtocolError("a job record that says something else than its settings do")
    return message


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
