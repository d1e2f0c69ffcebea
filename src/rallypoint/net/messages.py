"""Control messages: typed msgspec structs, encoded as msgpack. They are small and rare, and no step waits for them."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from rallypoint.core.job import JobRecord
from rallypoint.core.view import View, ViewNumber
from rallypoint.errors import ProtocolError


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# ---- greeting --------------------------------------------------------------------------------------------------


class Challenge(_Message, frozen=True):
    """The listener's nonce. The answer proves that the peer has the token, without sending it."""

    nonce: bytes


class Hello(_Message, frozen=True):
    """Who connects.

    `role` is worker, server or observer. `address` is where a server listens. `incarnation` is the number that the
    coordinator gave this member earlier (0: none). `view` is the newest view that it knows.
    """

    role: str
    id: str
    host: str
    proof: bytes
    address: str = ""
    incarnation: int = 0
    view: ViewNumber = ViewNumber()


class Welcome(_Message, frozen=True):
    """The listener accepts the connection.

    `overrides` come from the launcher's command line. `folder` is the run's folder for results. `trace` is the range of
    steps to trace, the end excluded. `snapshots` is the URL of the snapshots. `heartbeat` is how many seconds a member
    may be silent.
    """

    overrides: dict[str, Any] = {}
    folder: str = ""
    trace: tuple[int, int] = (0, 0)
    snapshots: str = ""
    compression: str = "none"
    heartbeat: float = 3.0


class Refused(_Message, frozen=True):
    """The listener refuses the connection, or ends it. `reason` is a sentence.

    `final`: connecting again would not help.
    """

    reason: str
    final: bool = False


# ---- member to coordinator -------------------------------------------------------------------------------------


class Propose(_Message, frozen=True):
    """A worker's model and settings."""

    record: JobRecord


class Beat(_Message, frozen=True):
    """A heartbeat."""


class Report(_Message, frozen=True):
    """One replica's step: its loss, weight, number of samples and seconds, and the generation it was computed in.

    `settings` is a digest of the settings of the worker's own optimizer at that step; "" if it has none.
    """

    step: int
    replica: int
    loss: float
    weight: float
    items: int
    seconds: float = 0.0
    generation: ViewNumber = ViewNumber()
    settings: str = ""


class Applied(_Message, frozen=True):
    """For the ledger: a primary or backup of the first shard has applied `step`, with `replicas` contributions.

    `at` is the unix time. `late` gives, for each worker, the seconds between the first contribution and its last one.
    `generation` is the generation in which the step was applied.
    """

    step: int
    replicas: int
    at: float
    late: dict[str, float] = {}
    generation: ViewNumber = ViewNumber()


class Accounted(_Message, frozen=True):
    """What happened to the contributions to the first shard, since this server has been its primary.

    Each is counted once: as applied, folded into another's update, or dropped. `staleness` is a histogram of the number
    of updates between the version a contribution was computed from and its own update.
    """

    applied: int
    folded: int
    dropped: int
    repeats: int
    staleness: dict[int, int] = {}
    generation: ViewNumber = ViewNumber()


class CaughtUp(_Message, frozen=True):
    """The shards whose backup has all published versions, and will have each later one before it is published.

    The value is the view that paired this primary with that backup.
    """

    backups: dict[int, ViewNumber]


class Leaving(_Message, frozen=True):
    """This member was told to leave: assign its replicas, or move its shards, to others."""


class Stored(_Message, frozen=True):
    """A server's part of a snapshot is stored.

    `files` gives each file's size in bytes; `shards` gives each shard's file, offset, length and checksum.
    """

    snapshot: str
    files: dict[str, int]
    shards: dict[int, tuple[str, int, int, str]]


class NotStored(_Message, frozen=True):
    """A server could not store its part of a snapshot.

    If it was too late, `passed` is the version that a shard had already reached; else -1.
    """

    snapshot: str
    reason: str
    passed: int = -1


class SnapshotWanted(_Message, frozen=True):
    """An observer asks for a snapshot now."""


class Resize(_Message, frozen=True):
    """An observer asks for this number of computing workers (others stand by) and of servers; 0: keep the number.

    The coordinator forwards it to all observers. One of them is the launcher: it starts processes, or tells some to
    leave.
    """

    workers: int
    servers: int = 0


class Metrics(_Message, frozen=True):
    """The result of an evaluation after `step` steps of training, in that generation."""

    step: int
    values: dict[str, float]
    generation: ViewNumber = ViewNumber()


class Say(_Message, frozen=True):
    """A line for the console and the event log."""

    text: str


class Skipped(_Message, frozen=True):
    """All servers skipped a step, because the losses of these replicas (or the gradient) were not finite."""

    step: int
    replicas: tuple[int, ...]
    generation: ViewNumber = ViewNumber()


class Done(_Message, frozen=True):
    """This worker has the last version of `generation`."""

    generation: ViewNumber = ViewNumber()


class GiveUp(_Message, frozen=True):
    """This member cannot continue. `reason` is a sentence."""

    reason: str


# ---- coordinator to member -------------------------------------------------------------------------------------


class Admitted(_Message, frozen=True):
    """The member's incarnation. If it differs from the earlier one, the member is new: what it held does not count."""

    incarnation: int


class Prepare(_Message, frozen=True):
    """To servers: the job."""

    record: JobRecord


class NewView(_Message, frozen=True):
    """The new view."""

    view: View


class Assist(_Message, frozen=True):
    """To an idle worker: compute a slow worker's replica as a backup task."""

    step: int
    replica: int


class Capture(_Message, frozen=True):
    """A snapshot begins.

    To servers: keep and store your shards at `version`. To stateful workers: worker number i of the n `writers` stores
    the shards i, i + n, i + 2n and so on.
    """

    snapshot: str
    version: int
    writers: tuple[str, ...] = ()


class Finished(_Message, frozen=True):
    """The job is done: all members may exit. The worker `lead` saves the model."""

    lead: str = ""


class Aborted(_Message, frozen=True):
    """The job cannot continue."""

    reason: str


# ---- coordinator to observer -----------------------------------------------------------------------------------


class Planned(_Message, frozen=True):
    """The running job, for a progress line. A round is `steps_per_round` of the `steps`.

    Each step uses `items` of `item` (such as samples). `done` steps were already done when this was sent.
    """

    steps: int
    replicas: int
    item: str
    words: int
    shards: int
    workers: tuple[str, ...]
    servers: tuple[str, ...]
    steps_per_round: int = 1
    items: int = 0
    done: int = 0


class StepDone(_Message, frozen=True):
    """All replicas have reported `step` (under local steps: the round that ends with it).

    `loss` is their weighted mean. `again` counts repeated reports so far: work that was done twice.
    """

    step: int
    loss: float
    items: int
    again: int = 0


class Waiting(_Message, frozen=True):
    """What the job waits for, as a sentence (I8)."""

    text: str


class Members(_Message, frozen=True):
    """The members of a new view, for observers. `exposed` counts the shards that only one server holds."""

    view: str
    workers: tuple[str, ...]
    standby: tuple[str, ...]
    servers: tuple[str, ...]
    exposed: int = 0


class Snapshotted(_Message, frozen=True):
    """A snapshot is complete and durable. `nbytes` is its size; `seconds` is how long it took."""

    snapshot: str
    version: int
    nbytes: int
    seconds: float


Message = (
    Challenge | Hello | Welcome | Refused | Propose | Beat | Report | Applied | Accounted | CaughtUp | Leaving
    | Stored | NotStored | SnapshotWanted | Resize | Metrics | Say | Skipped | Done | GiveUp | Admitted | Prepare
    | NewView | Assist | Capture | Finished | Aborted | Planned | StepDone | Waiting | Members | Snapshotted
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_M = TypeVar("_M")


def encode(message: Message) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decode a message. ProtocolError if the bytes are no message."""
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a control message that cannot be read: {error}") from None
    return message


def expect(data: bytes | bytearray | memoryview, kind: type[_M]) -> _M:
    """Decode a message that must be a `kind`. ProtocolError otherwise."""
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"a {type(message).__name__} message where {kind.__name__} was expected")
    return message
