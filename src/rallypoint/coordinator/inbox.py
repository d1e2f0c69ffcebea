"""What comes to a coordinator: from connections, from the store, from outside. Typed, so that it can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from rallypoint.net.messages import Hello, Message

Connection = Hashable  # a channel, or a simulated wire: the shell only compares it


@dataclass(frozen=True, slots=True)
class Opened:
    """Somebody connected and said hello."""

    connection: Connection
    hello: Hello


@dataclass(frozen=True, slots=True)
class Received:
    """A message came, and is one that its sender may say."""

    connection: Connection
    hello: Hello
    message: Message


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection ended; `reason` is what is known of it."""

    connection: Connection
    hello: Hello
    reason: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class SnapshotCommitted:
    """The manifest is written: the snapshot is durable."""

    snapshot: str
    version: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """The manifest could not be written."""

    snapshot: str
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotFound:
    """The newest usable snapshot; "" if there is none."""

    snapshot: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class Ended:
    """The job cannot go on, for a reason outside the machine: a person, a child that died, a fault of ours."""

    reason: str


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence for those who watch."""

    text: str


@dataclass(frozen=True, slots=True)
class Barrier:
    """Call `reached` when all that came before has been handled."""

    reached: Callable[[], None]


Event = (
    Opened | Received | Closed | Ticked | SnapshotCommitted | SnapshotFailed | SnapshotFound | Ended | Said
)  # fmt: skip
