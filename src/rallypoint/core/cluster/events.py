"""Events of the coordinator's machine: who comes, goes and reports, what became of snapshots, what time it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rallypoint.core.job import JobRecord
from rallypoint.core.view import Member, ViewNumber


@dataclass(frozen=True, slots=True)
class Joined:
    """A server or a worker said hello; `member.incarnation` is what it was given before, 0 if nothing."""

    member: Member
    role: str  # "server" or "worker"


@dataclass(frozen=True, slots=True)
class Proposed:
    """A worker proposes the job's record: its model's layout and its settings."""

    worker: str
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker has computed a replica of `step` in `seconds`, in that generation; it is `now`."""

    worker: str
    step: int
    replica: int
    seconds: float
    generation: ViewNumber
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A primary's backup of these shards, as they met in that view, holds all that it has published, and will from
    now on."""

    server: str
    backups: Mapping[int, ViewNumber]


@dataclass(frozen=True, slots=True)
class Leaving:
    """A member was told to go: a worker hands its replicas back, a server its shards."""

    member: str


@dataclass(frozen=True, slots=True)
class Done:
    """A worker holds the last version, in that generation."""

    worker: str
    generation: ViewNumber


@dataclass(frozen=True, slots=True)
class Left:
    """A member's connection ended; `reason` is what is known of it."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A member gave up and says why."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life."""

    member: str


@dataclass(frozen=True, slots=True)
class Tick:
    """It is `now`, in seconds."""

    now: float


@dataclass(frozen=True, slots=True)
class Resized:
    """So many workers are to compute at most from now on."""

    workers: int


@dataclass(frozen=True, slots=True)
class SnapshotWanted:
    """Somebody asks for a snapshot."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A server has stored these shards of a snapshot."""

    server: str
    snapshot: str
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotLost:
    """A server could not take its part of a snapshot, or the manifest could not be written."""

    snapshot: str
    reason: str
    passed: int = -1  # a shard was at this version already


@dataclass(frozen=True, slots=True)
class Committed:
    """A snapshot is complete and durable."""

    snapshot: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest usable snapshot; "" if there is none."""

    snapshot: str
    version: int = -1


Event = (
    Joined | Proposed | Progress | CaughtUp | Leaving | Done | Left | Failed | Heard | Tick | Resized | SnapshotWanted
    | Captured | SnapshotLost | Committed | Found
)  # fmt: skip
