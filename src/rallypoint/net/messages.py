"""Control messages: typed msgspec structs, encoded as msgpack. Small, rare, and not on the path of a step."""

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
    """The listener's nonce; the answer proves the token without sending it."""

    nonce: bytes


class Hello(_Message, frozen=True):
    """Who connects: `role` is worker, server or observer; `address` is where a server listens; `incarnation` is the
    number that the coordinator has given it before; `view` the newest one it knows."""

    role: str
    id: str
    host: str
    proof: bytes
    address: str = ""
    incarnation: int = 0
    view: ViewNumber = ViewNumber()


class Welcome(_Message, frozen=True):
    """You are in. `overrides` come from the launcher's command line, `trace` says which steps to trace, `snapshots` is
    where they are, `heartbeat` (seconds) how long a member may be silent."""

    overrides: dict[str, Any] = {}
    folder: str = ""
    trace: tuple[int, int] = (0, 0)
    snapshots: str = ""
    compression: str = "none"
    heartbeat: float = 3.0


class Refused(_Message, frozen=True):
    """You are not in, or no longer; the reason is a sentence. `final`: coming back would change nothing."""

    reason: str
    final: bool = False


# ---- member to coordinator -------------------------------------------------------------------------------------


class Propose(_Message, frozen=True):
    """A worker's model and settings."""

    record: JobRecord


class Beat(_Message, frozen=True):
    """A sign of life."""


class Report(_Message, frozen=True):
    """A replica's step: its loss, its weight, its samples, its seconds, and the generation in which it was computed.

    `settings` is a digest of the worker's own optimizer's settings at that step; "" where there is none.
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
    """The ledger: a holder of the first shard has applied `step`, made of so many contributions, at `at` (unix time);
    `late` says how long after the first contribution each worker's last one came; `generation`: when it was applied."""

    step: int
    replicas: int
    at: float
    late: dict[str, float] = {}
    generation: ViewNumber = ViewNumber()


class Accounted(_Message, frozen=True):
    """What has become of contributions to the first shard, under this primary: each is counted once, as applied, folded
    into another's update, or dropped; `staleness` counts them by the updates between reading and writing."""

    applied: int
    folded: int
    dropped: int
    repeats: int
    staleness: dict[int, int] = {}
    generation: ViewNumber = ViewNumber()


class CaughtUp(_Message, frozen=True):
    """The shards whose backup holds all that was published, and will from now on; of each the view in which its
    primary and backup met."""

    backups: dict[int, ViewNumber]


class Leaving(_Message, frozen=True):
    """This member was told to go: a worker hands its replicas back, a server its shards."""


class Stored(_Message, frozen=True):
    """A server's part of a snapshot: files with their sizes; of every shard its file, offset, length and checksum."""

    snapshot: str
    files: dict[str, int]
    shards: dict[int, tuple[str, int, int, str]]


class NotStored(_Message, frozen=True):
    """A server could not store its part of a snapshot; `passed` is the version a shard was at when it was too late."""

    snapshot: str
    reason: str
    passed: int = -1


class SnapshotWanted(_Message, frozen=True):
    """An observer asks for a snapshot now."""


class Resize(_Message, frozen=True):
    """An observer asks for so many workers that compute (more stand by) and so many servers; 0: as many as now. The
    coordinator tells all observers: the launcher among them starts processes, or tells some to go."""

    workers: int
    servers: int = 0


class Metrics(_Message, frozen=True):
    """What an evaluation found after `step` steps of training, in that generation."""

    step: int
    values: dict[str, float]
    generation: ViewNumber = ViewNumber()


class Say(_Message, frozen=True):
    """A line for the console and the event log."""

    text: str


class Skipped(_Message, frozen=True):
    """A step was skipped on all servers because these replicas (or the gradient) were not finite."""

    step: int
    replicas: tuple[int, ...]
    generation: ViewNumber = ViewNumber()


class Done(_Message, frozen=True):
    """This worker holds the last version of `generation`."""

    generation: ViewNumber = ViewNumber()


class GiveUp(_Message, frozen=True):
    """This member cannot go on."""

    reason: str


# ---- coordinator to member -------------------------------------------------------------------------------------


class Admitted(_Message, frozen=True):
    """A member's incarnation. If it is not the one it had, it is somebody new: what it held does not count."""

    incarnation: int


class Prepare(_Message, frozen=True):
    """To servers: the job."""

    record: JobRecord


class NewView(_Message, frozen=True):
    """The view from now on."""

    view: View


class Assist(_Message, frozen=True):
    """To an idle worker: a straggler's replica, as a backup task."""

    step: int
    replica: int


class Capture(_Message, frozen=True):
    """To servers: keep and store your shards at `version`. To stateful workers: each its share of all shards, every
    n-th from its place among the n `writers` on."""

    snapshot: str
    version: int
    writers: tuple[str, ...] = ()


class Finished(_Message, frozen=True):
    """Everybody may go home; `lead` saves the model."""

    lead: str = ""


class Aborted(_Message, frozen=True):
    """The job cannot go on."""

    reason: str


# ---- coordinator to observer -----------------------------------------------------------------------------------


class Planned(_Message, frozen=True):
    """The job that runs: what a progress line needs to know. A round is `steps_per_round` of the `steps`.

    Each step uses `items` of `item`; `done` steps were behind the job when this was said."""

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
    """All replicas have reported `step` (under local steps: the round that ends with it); `loss` is their weighted
    mean. `again` counts reports so far of what had been reported before: work done twice."""

    step: int
    loss: float
    items: int
    again: int = 0


class Waiting(_Message, frozen=True):
    """What the job waits for (I8)."""

    text: str


class Members(_Message, frozen=True):
    """A new view, for those who watch: who is here; `exposed` counts the shards that only one server holds."""

    view: str
    workers: tuple[str, ...]
    standby: tuple[str, ...]
    servers: tuple[str, ...]
    exposed: int = 0


class Snapshotted(_Message, frozen=True):
    """A snapshot is complete and durable: where, of which version, how large, how long it took."""

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
    """The message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message in these bytes. ProtocolError when there is none."""
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a control message that cannot be read: {error}") from None
    return message


def expect(data: bytes | bytearray | memoryview, kind: type[_M]) -> _M:
    """The message in these bytes, which must be a `kind`. ProtocolError otherwise."""
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"a {type(message).__name__} message where {kind.__name__} was expected")
    return message
