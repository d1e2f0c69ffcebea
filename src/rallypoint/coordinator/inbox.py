"""Events of the coordinator's shell: from connections, from the snapshot keeper, from outside.

What the keeper finds, and what it cannot write, are the machine's events as they stand.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable

import msgspec

from rallypoint.core.cluster.state import Origin
from rallypoint.core.protocol import Aborted, Hello, Message, NotStored, Say, Snapshotted

Connection = Hashable  # a channel, or a simulated wire: the shell only compares it


class End(enum.Enum):
    """How a connection ended."""

    CLOSED = "closed"  # the other process closed it or has ended, or broke the protocol
    RESET = "reset"  # the other machine reset it: see `core.cluster.events.Unlinked`
    LOST = "lost"  # the network did not carry for too long


class Opened(msgspec.Struct, frozen=True):
    """A worker, server or observer has connected and said hello."""

    connection: Connection
    hello: Hello


class Received(msgspec.Struct, frozen=True):
    """A message has arrived; `coordinator.connections` has accepted it."""

    connection: Connection
    hello: Hello
    message: Message


class Closed(msgspec.Struct, frozen=True):
    """A connection ended; `reason` says why, as far as known."""

    connection: Connection
    hello: Hello
    reason: str
    how: End = End.CLOSED


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed: the owner's thread sends it at a fixed interval."""


class Barrier(msgspec.Struct, frozen=True):
    """Call `reached`, on the owner's thread, when all events before it have been handled."""

    reached: Callable[[], None]


# (`Say`: a sentence for the observers. `Aborted`: the job ends for a reason outside the machine: a user, a child
# process that died, an error of the coordinator.)
Event = Opened | Received | Closed | Ticked | Snapshotted | NotStored | Origin | Say | Aborted
