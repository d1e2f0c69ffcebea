"""What may happen to a server's shards: the events that other threads put into the reducer's inbox.

Each carries what became true and, where that can grow stale, the number of the view under which it did.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rallypoint.core.shard.clip import Measure, Verdict
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header
from rallypoint.net.pool import Buffer
from rallypoint.server.shards.rows import Ids
from rallypoint.store.record import ShardRecord

# ---- from workers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linked:
    """A worker connected (again)."""

    channel: Channel
    worker: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A connection from a worker or a server is closed."""

    channel: Channel
    peer: str


@dataclass(frozen=True, slots=True)
class Followed:
    """A worker wants the newest version of every shard, and every one from now on."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """A worker wants no more versions."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class Wanted:
    """A worker wants the parameters for a replica's next step."""

    channel: Channel
    worker: str
    shard: int
    replica: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A worker wants one version once more."""

    channel: Channel
    shard: int
    version: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """A worker wants rows of a table's part, at a version that may be still to come."""

    channel: Channel
    header: Header
    ids: Ids


@dataclass(frozen=True, slots=True)
class Initial:
    """The version of a shard that all begin with."""

    channel: Channel
    header: Header
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Pushed:
    """A contribution to a shard's step, and what its worker wants next."""

    channel: Channel
    worker: str
    header: Header
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class StateGiven:
    """The codec state of a replica that the worker computes no longer, or a copy of it for a snapshot."""

    worker: str
    header: Header
    data: memoryview


@dataclass(frozen=True, slots=True)
class StateRecalled:
    """A worker that is to compute a replica asks for its codec state."""

    channel: Channel
    worker: str
    header: Header


# ---- from other servers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerLinked:
    """The link to another server stands."""

    peer: Member
    channel: Channel


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to another server is gone."""

    peer: str
    channel: Channel


@dataclass(frozen=True, slots=True)
class Replicated:
    """A primary's update of a shard that this server is the backup of."""

    channel: Channel
    sender: str
    header: Header
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Filled:
    """A primary's whole state of a shard that this server is the backup of."""

    channel: Channel
    sender: str
    record: ShardRecord
    number: ViewNumber


@dataclass(frozen=True, slots=True)
class Acked:
    """A backup holds a version."""

    peer: str
    channel: Channel
    shard: int
    version: int
    number: ViewNumber


@dataclass(frozen=True, slots=True)
class Told:
    """Another server's measures of a step."""

    step: int
    measures: tuple[Measure, ...]
    number: ViewNumber


# ---- from the coordinator, and from the server itself ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Viewed:
    """A view."""

    view: View


@dataclass(frozen=True, slots=True)
class Admitted:
    """The coordinator let this server in; `new`: as somebody that it did not know."""

    new: bool


@dataclass(frozen=True, slots=True)
class CaptureWanted:
    """A snapshot is wanted of all shards that are primary here."""

    snapshot: str
    version: int


@dataclass(frozen=True, slots=True)
class Decided:
    """What all servers do with a step; it waits behind the effects that brought it."""

    verdict: Verdict


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
    """Nothing happened, but there may be something to do in idle time. `done` is set once the owner comes here."""

    done: threading.Event | None = None


Event = (
    Linked | Gone | Followed | Unfollowed | Wanted | Fetched | Pulled | Initial | Pushed | StateGiven | StateRecalled
    | PeerLinked | PeerLost | Replicated | Filled | Acked | Told | Viewed | Admitted | CaptureWanted | Decided
    | Restored | RestoreFailed | Wake
)  # fmt: skip
