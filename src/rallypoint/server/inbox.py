"""The events that other threads put into the reducer's inbox.

An event that can become stale carries the number of the view in which it became true.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import msgspec

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


class Linked(msgspec.Struct, frozen=True):
    """A worker connected (again)."""

    channel: Channel
    worker: str


class Gone(msgspec.Struct, frozen=True):
    """A connection from a worker or a server closed."""

    channel: Channel
    peer: str


class Followed(msgspec.Struct, frozen=True):
    """A worker wants the newest version of every shard, and every later one."""

    channel: Channel
    worker: str
    header: Header


class UnfollowCame(msgspec.Struct, frozen=True):
    """A worker wants no more versions."""

    channel: Channel
    worker: str


class WantCame(msgspec.Struct, frozen=True):
    """A worker wants the parameters for a replica's next step."""

    channel: Channel
    worker: str
    shard: int
    replica: int


class Fetched(msgspec.Struct, frozen=True):
    """A worker wants one version again."""

    channel: Channel
    worker: str
    shard: int
    version: int


class PullCame(msgspec.Struct, frozen=True):
    """A worker wants rows of a table's part, at a version that may not exist yet. `ids` is None: it wants words."""

    channel: Channel
    header: Header
    ids: Ids | None


class Initial(msgspec.Struct, frozen=True):
    """A worker uploaded the first version of a shard."""

    channel: Channel
    header: Header
    buffer: Buffer


class Pushed(msgspec.Struct, frozen=True):
    """A worker's contribution to a shard's step, with what the worker wants next."""

    channel: Channel
    worker: str
    header: Header
    buffer: Buffer
    digest: bytes = b""  # of an audited contribution


class StateGiven(msgspec.Struct, frozen=True):
    """A worker sent the codec state of a replica that it no longer computes, or a copy of one for a snapshot."""

    worker: str
    header: Header
    data: memoryview


class StateRecalled(msgspec.Struct, frozen=True):
    """A worker that will compute a replica asks for its codec state."""

    channel: Channel
    worker: str
    header: Header


# ---- from other servers ----------------------------------------------------------------------------------------


class PeerLinked(msgspec.Struct, frozen=True):
    """The link to another server is up."""

    peer: Member
    channel: Channel


class PeerLost(msgspec.Struct, frozen=True):
    """The link to another server is lost."""

    peer: str
    channel: Channel


class UpdateCame(msgspec.Struct, frozen=True):
    """The primary's update of a shard of which this server is the backup."""

    channel: Channel
    sender: str
    header: Header
    buffer: Buffer


class StateCame(msgspec.Struct, frozen=True):
    """The primary's whole state of a shard of which this server is the backup."""

    channel: Channel
    sender: str
    record: ShardRecord
    number: ViewNumber


class ChoiceCame(msgspec.Struct, frozen=True):
    """A primary told this backup which contributions make an update, in the order of adding."""

    channel: Channel
    sender: str
    header: Header
    replicas: tuple[int, ...]


class QuestionCame(msgspec.Struct, frozen=True):
    """A primary asks this backup whether it holds the state whose digest is `sealed`."""

    channel: Channel
    sender: str
    header: Header
    sealed: bytes


class AckCame(msgspec.Struct, frozen=True):
    """A backup acknowledged a version, with the digest of what it holds."""

    peer: str
    channel: Channel
    shard: int
    acked: events.Acked
    number: ViewNumber
    digest: bytes


class Told(msgspec.Struct, frozen=True):
    """Another server sent its measures of a step."""

    step: int
    measures: tuple[Measure, ...]
    number: ViewNumber


# ---- from the coordinator, and from the server itself ----------------------------------------------------------


class ViewCame(msgspec.Struct, frozen=True):
    """The coordinator published a view."""

    view: View


class AdmissionCame(msgspec.Struct, frozen=True):
    """The coordinator admitted this server. `new`: as a member that it did not know."""

    new: bool


class UpdateMade(msgspec.Struct, frozen=True):
    """A thread has made an update of this shard, or failed."""

    shard: int
    made: Future[tuple[Buffer, int] | None]


class Restored(msgspec.Struct, frozen=True):
    """One shard was read from the snapshot that `generation` begins with."""

    record: ShardRecord
    generation: ViewNumber


class RestoreFailed(msgspec.Struct, frozen=True):
    """The snapshot that `generation` begins with cannot be read."""

    error: Exception
    generation: ViewNumber


class Wake(msgspec.Struct, frozen=True):
    """Nothing happened, but there may be idle work. `done` is set when the owner reaches this event."""

    done: threading.Event | None = None


Event = (
    Linked | Gone | Followed | UnfollowCame | WantCame | Fetched | PullCame | Initial | Pushed | StateGiven
    | StateRecalled | PeerLinked | PeerLost | UpdateCame | StateCame | ChoiceCame | QuestionCame | AckCame | Told
    | ViewCame | AdmissionCame | Capture | StepVerdict | UpdateMade | Restored | RestoreFailed | Wake
)  # fmt: skip
# (A verdict waits in the inbox behind the effects that came with it)
