"""Checks which messages the coordinator accepts, and from which role."""

from __future__ import annotations

import math
from typing import get_args

import msgspec

from rallypoint.config import JobConfig, parse, record_of
from rallypoint.config.keys import GROUPS
from rallypoint.core.protocol import (
    Accounted,
    AnyOrder,
    Applied,
    AuditFound,
    Beat,
    CaughtUp,
    Contributed,
    Disproved,
    Done,
    Evaluated,
    Evaluates,
    GiveUp,
    Hello,
    Knows,
    Leaving,
    Message,
    NotStored,
    Offers,
    Propose,
    Reached,
    Release,
    Report,
    Resize,
    Sampled,
    Say,
    ScriptAt,
    Skipped,
    SnapshotWanted,
    Stop,
    Stored,
    Unrestored,
    Updated,
)
from rallypoint.errors import ConfigError, ProtocolError

MOST = 10_000  # the most workers or servers that a `Resize` may ask for, or a `Beat` may name
MOST_THREADS = 1 << 16  # as in `Welcome`
_AGE_S = 1e9  # no wait is longer

_MAY_SAY: dict[str, tuple[type, ...]] = {
    "worker": (
        *(Knows, Propose, Beat, Report, Leaving, Stored, NotStored, Say, Stop, Done, GiveUp),
        *(Evaluates, Evaluated, Contributed, Sampled, Offers, ScriptAt, Reached),
    ),
    "server": (
        *(Knows, Beat, Applied, Accounted, CaughtUp, Disproved, Leaving, Stored, NotStored, Skipped, Say, GiveUp),
        *(Updated, AuditFound, Sampled, Unrestored),
    ),
    "aggregator": (Knows, Beat, Say, Sampled),
    "observer": (SnapshotWanted, Resize, Release, *get_args(AnyOrder)),
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
