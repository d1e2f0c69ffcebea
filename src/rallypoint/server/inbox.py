"""The events that other threads put into the reducer's inbox.

An event that can become stale carries the number of the view in which it became true.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from rallypoint.core.protocol import Capture
from rallypoint.core.shard import events
from rallypoint.core.shard.clip import Measure, StepVerdict
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header
from rallypoint.net.pool import Buffer
from rallypoint.server.rows import Ids
from rallypoint.store.record import ShardRecord

# ---- from workers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linked:
    """A worker connected (again)."""

    channel: Channel
    worker: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A connection from a worker or a server closed."""

    channel: Channel
    peer: str


@dataclass(frozen=True, slots=True)
class Followed:
    """A worker wants the newest version of every shard, and every later one."""

    channel: Channel
    worker: str
    header: Header


@dataclass(frozen=True, slots=True)
class UnfollowCame:
    """A worker wants no more versions."""

    channel: Channel
    worker: str


@dataclass(frozen=True, slots=True)
class WantCame:
    """A worker wants the parameters for a replica's next step."""

    channel: Channel
    worker: str
    shard: int
    replica: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A worker wants one version again."""

    channel: Channel
    worker: str
    shard: int
    version: int


@dataclass(frozen=True, slots=True)
class PullCame:
    """A worker wants rows of a table's part, at a version that may not exist yet. `ids` is None: it wants words."""

    channel: Channel
    header: Header
    ids: Ids | None


@dataclass(frozen=True, slots=True)
class Initial:
    """A worker uploaded the first version of a shard."""

    channel: Channel
    header: Header
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Pushed:
    """A worker's contribution to a shard's step, with what the worker wants next."""

    channel: Channel
    worker: str
    header: Header
    buffer: Buffer
    digest: bytes = b""  # of an audited contribution


@dataclass(frozen=True, slots=True)
class StateGiven:
    """A worker sent the codec state of a replica that it no longer computes, or a copy of one for a snapshot."""

    worker: str
    header: Header
    data: memoryview


@dataclass(frozen=True, slots=True)
class StateRecalled:
    """A worker that will compute a replica asks for its codec state."""

    channel: Channel
    worker: str
    header: Header


# ---- from other servers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerLinked:
    """The link to another server is up."""

    peer: Member
    channel: Channel


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to another server is lost."""

    peer: str
    channel: Channel


@dataclass(frozen=True, slots=True)
class UpdateCame:
    """The primary's update of a shard of which this server is the backup."""

    channel: Channel
    sender: str
    header: Header
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class StateCame:
    """The primary's whole state of a shard of which this server is the backup."""

    channel: Channel
    sender: str
    record: ShardRecord
    number: ViewNumber


@dataclass(frozen=True, slots=True)
class ChoiceCame:
    """A primary told this backup which contributions make an update, in the order of adding."""

    channel: Channel
    sender: str
    header: Header
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QuestionCame:
    """A primary asks this backup whether it holds the state whose digest is `sealed`."""

    channel: Channel
    sender: str
    header: Header
    sealed: bytes


@dataclass(frozen=True, slots=True)
class AckCame:
    """A backup acknowledged a version, with the digest of what it holds."""

    peer: str
    channel: Channel
    shard: int
    acked: events.Acked
    number: ViewNumber
    digest: bytes


@dataclass(frozen=True, slots=True)
class Told:
    """Another server sent its measures of a step."""

    step: int
    measures: tuple[Measure, ...]
    number: ViewNumber


# ---- from the coordinator, and from the server itself ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ViewCame:
    """The coordinator published a view."""

    view: View


@dataclass(frozen=True, slots=True)
class AdmissionCame:
    """The coordinator admitted this server. `new`: as a member that it did not know."""

    new: bool


@dataclass(frozen=True, slots=True)
class UpdateMade:
    """A thread has made an update of this shard, or failed."""

    shard: int
    made: Future[tuple[Buffer, int] | None]


@dataclass(frozen=True, slots=True)
class Restored:
    """One shard was read from the snapshot that `generation` begins with."""

    record: ShardRecord
    generation: ViewNumber


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The snapshot that `generation` begins with cannot be read."""

    error: Exception
    generation: ViewNumber


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing happened, but there may be idle work. `done` is set when the owner reaches this event."""

    done: threading.Event | None = None


Event = (
    Linked | Gone | Followed | UnfollowCame | WantCame | Fetched | PullCame | Initial | Pushed | StateGiven
    | StateRecalled | PeerLinked | PeerLost | UpdateCame | StateCame | ChoiceCame | QuestionCame | AckCame | Told
    | ViewCame | AdmissionCame | Capture | StepVerdict | UpdateMade | Restored | RestoreFailed | Wake
)  # fmt: skip
# (A verdict waits in the inbox behind the effects that came with it)
