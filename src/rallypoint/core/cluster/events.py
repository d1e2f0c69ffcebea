"""Events of the coordinator's machine: members join, report and leave; results of snapshots; the time."""

from __future__ import annotations

import msgspec

from rallypoint.core.cluster.state import ClusterState, Origin
from rallypoint.core.protocol import Message, NotStored, Pause, Release, Resize, Snapshotted, SnapshotWanted
from rallypoint.core.view import Member, ViewNumber


class TookOver(msgspec.Struct, frozen=True):
    """Members of an earlier coordinator have said what they know: go on from this state; None: from the journal's.

    It comes before all other events, or not at all. `complete`: no view had an effect that nobody has told of.
    """

    state: ClusterState | None
    complete: bool


class Outrun(msgspec.Struct, frozen=True):
    """A member knows a newer view of an earlier coordinator than the one from which this coordinator went on."""

    member: str
    number: ViewNumber


class Joined(msgspec.Struct, frozen=True):
    """A process connected; `member.incarnation` is what it was given before, 0 if it knows of none.

    `process` is a name that no other process has: it may have been admitted, and its connection have broken before it
    heard of that.
    """

    member: Member
    role: str  # "server", "worker" or "aggregator"
    process: bytes = b""


class From(msgspec.Struct, frozen=True):
    """A member's message: it is the machine's event as it stands, once `coordinator.claims` has believed it."""

    member: str
    message: Message


class Computed(msgspec.Struct, frozen=True):
    """A worker has computed a replica of `step` in `seconds`, in that generation; the time is `now`, in seconds."""

    worker: str
    step: int
    replica: int
    seconds: float
    generation: ViewNumber
    now: float = 0.0


class Left(msgspec.Struct, frozen=True):
    """A member's process closed its connection, or has ended; `reason` says why, as far as known."""

    member: str
    reason: str


class Unlinked(msgspec.Struct, frozen=True):
    """A member's connection broke, and its process may live: the network does not carry. Or (`reset`) its system, which
    had answered until then, has reset it: a dead process's system does that."""

    member: str
    reason: str
    reset: bool = False


class Heard(msgspec.Struct, frozen=True):
    """A member sent a sign of life."""

    member: str


class Tick(msgspec.Struct, frozen=True):
    """The time is `now`, in seconds of a clock that never goes back.

    Attributes:
        replaced: members that are expected back, and under whose names other processes wait to join.
    """

    now: float
    replaced: frozenset[str] = frozenset()


class Captured(msgspec.Struct, frozen=True):
    """The member `server` (a server, or a worker under AllReduce) has stored these shards of a snapshot."""

    server: str
    snapshot: str
    shards: tuple[int, ...]


Event = (
    From | Joined | Computed | Left | Unlinked | Heard | Tick | Resize | SnapshotWanted | Captured | NotStored
    | Snapshotted | Origin | TookOver | Outrun | Release | Pause
)  # fmt: skip

# (`Resize`, `Pause`, `SnapshotWanted` and `Release` come from an operator. `NotStored`: a member could not store its
# part, or the manifest could not be written)

OFTEN = (Heard, Computed)  # these come all the time
