"""Control messages: typed msgspec structs, encoded as msgpack. They are small and rare, and no step waits for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rallypoint.core.decisions import StopWhen
from rallypoint.core.job import JobRecord
from rallypoint.core.plan.topology import Mbit
from rallypoint.core.sums import DIGEST_BYTES
from rallypoint.core.typed import (
    LONGEST_NAME,
    LONGEST_TEXT,
    MOST_MEMBERS,
    MOST_METRICS,
    Count,
    HasSent,
    Index,
    Name,
    Norm,
    Replicas,
    Seconds,
    printable,
)
from rallypoint.core.view import View, ViewDifference, ViewNumber
from rallypoint.errors import ProtocolError

# ---- The messages of the greeting (`handshake.py`), and what all messages have in common ----

Secret = Annotated[bytes, msgspec.Meta(max_length=32)]
Hidden = Annotated[bytes, msgspec.Meta(max_length=60)]  # a secret, encrypted on its way (`seal.Secrets`)


class AnyMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A control message."""


class Shown(AnyMessage, frozen=True):
    """A message whose text people see: it is one line of limited length, without control characters."""

    def __post_init__(self) -> None:
        for field in ("text", "reason"):
            if (text := getattr(self, field, None)) is not None:
                msgspec.structs.force_setattr(self, field, printable(" ".join(text.splitlines()), LONGEST_TEXT))


class Challenge(AnyMessage, frozen=True):
    """The listener's nonce, and who listens: its role (coordinator or server), id ("" for the coordinator) and
    incarnation (0 for the coordinator)."""

    nonce: bytes
    role: str = ""
    id: str = ""
    incarnation: int = 0


class Hello(AnyMessage, frozen=True):
    """Who connects, and to whom.

    `role` is worker, server, aggregator or observer. `address` is where a server or an aggregator listens, `near` the
    place where a member is, and `link_mbit` what its link carries (see `core.view.Member`). `incarnation` is the number
    that the coordinator gave this member earlier (0: none). `view` is the newest view that it knows. `to` is the (role,
    id, incarnation) of the listener that it means. `nonce` makes the listener's proof good for this connection only.
    `process` is a random name of the process that joins: the coordinator knows it by that until it has heard of its
    admission. `payloads` names what it could use for large payloads in place of the stream (`Connection.offers`).
    """

    role: str
    id: str
    host: str
    address: str = ""
    incarnation: int = 0
    view: ViewNumber = ViewNumber()
    to: tuple[str, str, int] = ("", "", 0)
    nonce: bytes = b""
    process: Secret = b""
    near: str = ""
    link_mbit: Mbit = 0.0
    payloads: str = ""


class Welcome(AnyMessage, frozen=True):
    """The listener accepts the connection.

    `overrides`: the launcher's. `folder`: of the run, for results. `trace`: the steps to trace, the end excluded.
    `snapshots`: their URL. `heartbeat`: seconds that a member may be silent. `workers`, `servers`: how many the job
    begins with. `link_mbit`: what the slowest link that was told carries; 0: none was. `one_host`: nobody on another
    host can join. `shard_bytes`: the job's; -1: none yet. `threads`: intra-op threads of a worker or a server.
    `payloads`: the Hello's, if both use it. `living`: seconds that a member goes on without a coordinator.
    """

    overrides: dict[str, Any] = {}
    folder: str = ""
    trace: tuple[int, int] = (0, 0)
    snapshots: str = ""
    compression: str = "none"
    heartbeat: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] = 3.0
    workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    servers: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    link_mbit: Mbit = 0.0
    one_host: bool = False
    shard_bytes: Annotated[int, msgspec.Meta(ge=-1, le=1 << 32)] = -1
    threads: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    payloads: str = ""
    living: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] = 60.0


class Refused(Shown, frozen=True):
    """The listener refuses the connection, or ends it. `reason` is a sentence.

    `final`: connecting again would not help.
    """

    reason: str
    final: bool = False


# ---- The messages of a member about its machine, itself, its links and its script ----

MOST_LINKS = 64  # of a member: those with the most bytes
MOST_GPUS = 16
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]  # bytes a second, or seconds a second
MOST_PACED = 1000  # servers of which a beat says how fast their links are
Paced = Annotated[dict[Name, tuple[Rate, Share]], msgspec.Meta(max_length=MOST_PACED)]
Address = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]


class GpuSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU: how busy it is, and bytes of its memory."""

    busy: Share
    used: Count
    total: Count


class LinkSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link: TCP's smoothed round trip (s; 0: unknown), bytes a second to the other side and from it."""

    round_trip: Seconds
    sent: Rate
    received: Rate


class Sampled(AnyMessage, frozen=True):
    """What a member's machine, the member itself and its links did in the last `seconds`.

    The machine: `cpu` is the share of all cores; `memory` the bytes in use, of `memory_total`; the rates are those of
    its disks and of its network without loopback. The member: processors that it uses, bytes of resident memory, the
    share of the time in which the script waited for data. `links`: by the address that the member has dialed; in the
    event log by the member that has it, and `member` and `host` are set there.
    """

    seconds: Seconds
    cpu: Share
    memory: Count
    memory_total: Count
    disk_read: Rate = 0.0
    disk_written: Rate = 0.0
    network_sent: Rate = 0.0
    network_received: Rate = 0.0
    own_cpu: Rate = 0.0
    own_memory: Count = 0
    waited_for_data: Share = 0.0
    gpus: Annotated[tuple[GpuSample, ...], msgspec.Meta(max_length=MOST_GPUS)] = ()
    links: Annotated[dict[Address, LinkSample], msgspec.Meta(max_length=MOST_LINKS)] = msgspec.field(
        default_factory=dict
    )
    member: Name = ""
    host: Name = ""


class ScriptAt(AnyMessage, frozen=True):
    """In a job of sums: the script of this rank has got so many `sums`, of `nbytes` that it has sent for them.

    `ended`: it asks for no more. The coordinator passes that on to all workers, with the name of the `worker`, and
    repeats the last one to observers about once a second.
    """

    rank: Index
    sums: Count = 0
    nbytes: Count = 0
    ended: bool = False
    worker: Name = ""


OfMembers = Sampled | ScriptAt


MOST_DIGESTS = 1 << 17
MOST_RULES = 100  # of run.stop_when

Digests = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=MOST_DIGESTS * DIGEST_BYTES)]
Workers = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=16)]
Figures = Annotated[dict[Name, float], msgspec.Meta(max_length=MOST_METRICS)]
Period = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]

# ---- member to coordinator -------------------------------------------------------------------------------------


class Propose(AnyMessage, frozen=True):
    """A worker's model and settings, and digests: `kernels` of its probe (with audits), `first` of its weights."""

    record: JobRecord
    kernels: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    first: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class Beat(AnyMessage, frozen=True):
    """A sign of life that says how its sender gets on.

    `unreachable` gives the seconds for which it could not reach a peer that it should reach, `waited` those for which a
    worker's main thread has waited for others since it last did something new (0.0: it does not wait). `activity` rises
    whenever that thread gets on; `evaluating`: it evaluates, and does nothing else until that is over. `paced` gives,
    by server, the bytes a second that the sender has sent to it since its last beat, and the share of the time in which
    some were on their way. Of itself a server says what it has sent to workers.
    """

    unreachable: dict[str, float] = msgspec.field(default_factory=dict)
    waited: float = 0.0
    activity: int = 0
    evaluating: bool = False
    paced: Paced = msgspec.field(default_factory=dict)


class Report(AnyMessage, frozen=True):
    """One replica's step: its loss, weight, number of samples and seconds, and the generation it was computed in.

    `settings` is a digest of the settings of the worker's own optimizer at that step; "" if it has none. `repeated`: it
    was sent before, maybe into a link that was broken already."""

    step: Index
    replica: Index
    loss: float
    weight: Annotated[float, msgspec.Meta(gt=0.0, le=1e300)]
    items: Count
    seconds: Seconds = 0.0
    generation: ViewNumber = ViewNumber()
    settings: Name = ""
    figures: Figures = msgspec.field(default_factory=dict)
    repeated: bool = False


class Applied(AnyMessage, frozen=True):
    """For the ledger: a primary or backup of the first shard has applied `step`, with `replicas` contributions.

    `at` is the unix time; 0.0: a server's state proves it, and the ledger gets no entry. `late` gives, for each worker,
    the seconds between the first contribution and its last one, `generation` the one in which the step was applied, and
    `norm` the 2-norm of the step's mean gradient before clipping, in jobs that clip, where it is finite.
    """

    step: Index
    replicas: Index
    at: Seconds
    late: Annotated[dict[Name, Seconds], msgspec.Meta(max_length=MOST_MEMBERS)] = msgspec.field(default_factory=dict)
    generation: ViewNumber = ViewNumber()
    norm: Norm | None = None


class Accounted(AnyMessage, frozen=True):
    """What happened to the contributions to the first shard, since this server has been its primary.

    Each is counted once: as applied, folded into another's update, or dropped. `staleness` is a histogram of the number
    of updates between the version a contribution was computed from and its own update.
    """

    applied: Count
    folded: Count
    dropped: Count
    repeats: Count
    staleness: Annotated[dict[Count, Count], msgspec.Meta(max_length=1 << 16)] = msgspec.field(default_factory=dict)
    generation: ViewNumber = ViewNumber()


class CaughtUp(AnyMessage, frozen=True):
    """The shards whose backup has all published versions, and will have each later one before it is published.

    The value is the view that paired this primary with that backup.
    """

    backups: dict[Index, ViewNumber]


class Disproved(AnyMessage, frozen=True):
    """A shard's backup does not hold the version that it has acknowledged: its digest is another one.

    `paired` is the view that paired this primary with that backup.
    """

    shard: Index
    version: Index
    paired: ViewNumber


class Leaving(AnyMessage, frozen=True):
    """This member was told to leave: assign its replicas, or move its shards, to others."""


class Stored(AnyMessage, frozen=True):
    """Some of a member's part of a snapshot is stored: usually one file, said as soon as it is written.

    `files` gives each file's size in bytes; `shards` gives each shard's file, offset, length and checksum.
    """

    snapshot: Name
    files: dict[Name, Count]
    shards: dict[Index, tuple[Name, Count, Count, Name]]


class NotStored(Shown, frozen=True):
    """A member could not store its part of a snapshot. If it was too late, `passed` is the version that a shard had
    already reached; else -1."""

    snapshot: Name
    reason: str
    passed: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)] = -1


class SnapshotWanted(AnyMessage, frozen=True):
    """An observer asks for a snapshot now."""


class Resize(AnyMessage, frozen=True):
    """An observer asks for this number of computing workers (others stand by) and of servers; 0: keep the number.

    The coordinator forwards it to all observers. One of them is the launcher: it starts processes, or tells some to
    leave.
    """

    workers: Count
    servers: Count = 0


class Held(AnyMessage, frozen=True):
    """For observers: the newest version is not stored yet, and members hold it in memory. `text` says why."""

    text: str


class Release(AnyMessage, frozen=True):
    """From an observer: end the job although its newest version is in no snapshot."""


class Say(Shown, frozen=True):
    """A line for the console and the event log."""

    text: str


class Skipped(AnyMessage, frozen=True):
    """A step was skipped (`alone`: one contribution to it): losses or `gradients` of these replicas were not finite,
    or only their sum. `parameter` is the first such tensor. `loss_scale` (fp16) is the scale of the next step."""

    step: Index
    replicas: Replicas
    generation: ViewNumber = ViewNumber()
    gradients: Replicas = ()
    parameter: Name = ""
    alone: bool = False
    loss_scale: float = 0.0


class Stop(Shown, frozen=True):
    """The script on this worker says that the job is to end with `version`, and why.

    `left`: it has left its loop, and the worker computes nothing any more: this is the version that needs nothing of
    it; -1: its loop goes on. `generation` is the one in which it was said.
    """

    version: Index
    reason: str = ""
    left: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)] = -1
    generation: ViewNumber = ViewNumber()


class Done(AnyMessage, frozen=True):
    """This worker has the last version of `generation`, and that is `version` (-1: the job's last round)."""

    generation: ViewNumber = ViewNumber()
    version: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)] = -1


class Evaluates(AnyMessage, frozen=True):
    """The script on this worker has evaluations with these periods, in steps, and rules by which they end the job."""

    periods: Annotated[tuple[Period, ...], msgspec.Meta(max_length=100)]
    stops: Annotated[tuple[StopWhen, ...], msgspec.Meta(max_length=MOST_RULES)] = ()


class Evaluated(AnyMessage, frozen=True):
    """This worker has run all evaluations that are due with `version`; `values` are all their figures.

    None in their place: it was to do so, and no server has that version any more.
    """

    version: Index
    generation: ViewNumber
    values: Figures | None


class GiveUp(Shown, frozen=True):
    """This member cannot continue. `reason` is a sentence.

    `version` is the newest that it has in this `generation`; 0: none, or a server cannot vouch for its shards any more.
    `sent`: which shards a worker has sent all that they need of it at that step.
    """

    reason: str
    version: Index = 0
    generation: ViewNumber = ViewNumber()
    sent: HasSent = "none"


class Reached(AnyMessage, frozen=True):
    """From a worker: it holds `version` of this generation. A view has asked for that: `core.placing.handover`."""

    version: Index
    generation: ViewNumber


class Unrestored(Shown, frozen=True):
    """From a server: the snapshot with which this generation begins is damaged, and it cannot load its shards."""

    reason: str
    generation: ViewNumber


# ---- digests for replays, findings of audits ----

class Fingerprint(AnyMessage, frozen=True):
    """Digests of 16 bytes each, one after the other, and the generation in which they were computed."""


class Contributed(Fingerprint, frozen=True):
    """From a worker: a replica's contribution to `step`, a digest for each of `dense_shards`, and its mean loss."""

    step: Index
    replica: Index
    loss: float
    digests: Digests
    generation: ViewNumber = ViewNumber()


class Updated(Fingerprint, frozen=True):
    """From a server: what a shard holds at `version`, a digest for each of `pieces_of`."""

    version: Index
    shard: Index
    digests: Digests
    generation: ViewNumber = ViewNumber()


class AuditFound(AnyMessage, frozen=True):
    """From a server: what an audit of this contribution has found, first in this shard.

    `agreed` have sent the same bytes and `others` something else: they have lost. Without `agreed`, all of `others`
    have sent different bytes, and the step waits.
    """

    step: Index
    replica: Index
    shard: Index
    agreed: Workers
    others: Workers
    generation: ViewNumber = ViewNumber()


# ---- coordinator to member -------------------------------------------------------------------------------------


class Admitted(AnyMessage, frozen=True):
    """The member's incarnation. If it differs from the earlier one, the member is new: what it held does not count.

    `secret` is this incarnation's own: see `net.handshake`. With it the member proves itself when it comes back, and a
    server knows the tickets of those who connect to it. It is encrypted on its way.
    """

    incarnation: int
    secret: Hidden = b""


class Knows(AnyMessage, frozen=True):
    """A member has come back, and knows this view as the newest; the coordinator may have been restarted.

    It is a member's first message after each joining but its first. None: it has been sent no view. `proof` is what
    came with the view.
    """

    view: View | None = None
    proof: Secret = b""


class Prepare(AnyMessage, frozen=True):
    """To servers: the job."""

    record: JobRecord


class NewView(AnyMessage, frozen=True):
    """The new view. `tickets` are the receiver's own, by server: it proves itself with them to the view's servers. They
    are encrypted on their way. With `proof` the receiver shows the next coordinator that an earlier one has published
    this view."""

    view: View
    tickets: dict[Name, Hidden] = msgspec.field(default_factory=dict)
    proof: Secret = b""


class ViewChange(AnyMessage, frozen=True):
    """The new view, as the difference to the last one that came on this connection.

    `tickets` are those for servers that are new since then (or new to the receiver); the others count on.
    """

    change: ViewDifference
    tickets: dict[Name, Hidden] = msgspec.field(default_factory=dict)
    proof: Secret = b""


class Assist(AnyMessage, frozen=True):
    """To an idle worker: compute a slow worker's replica as a backup task."""

    step: int
    replica: int


class Capture(AnyMessage, frozen=True):
    """A snapshot begins.

    To servers: keep and store your shards at `version`. To stateful workers: worker number i of the n `writers` stores
    the shards i, i + n, i + 2n and so on.
    """

    snapshot: str
    version: int
    writers: tuple[str, ...] = ()


class Finished(AnyMessage, frozen=True):
    """The job is done: all members may exit. The worker `lead` saves the model.

    `stopped_at`: the script has stopped it after so many steps of training, for the reason `why`; -1: it has not.
    """

    lead: str = ""
    stopped_at: int = -1
    why: str = ""


class Aborted(Shown, frozen=True):
    """The job cannot go on, and why."""

    reason: str


# ---- an operator's orders (sizes, snapshots: above), and what has come of them --------------------------------------


class Order(AnyMessage, frozen=True):
    """Something that an operator orders. The coordinator answers all observers with `Ordered`."""


class Pause(Order, frozen=True):
    """Compute no further step for now; with ``on=False``: go on."""

    on: bool = True


class StopWanted(Order, frozen=True):
    """End the job with the step that is being computed, as a script's ``run.stop(reason)`` does. To workers too."""

    reason: Name = ""


class Drain(Order, frozen=True):
    """Tell a worker or a server to leave. The coordinator passes it on to all observers: the launcher tells it."""

    member: Name


AnyOrder = Pause | StopWanted | Drain


class Ordered(Shown, frozen=True):
    """What has come of an order of this kind, as a sentence; `refused`: nothing."""

    kind: Name
    text: str
    refused: bool = False


# ---- coordinator to observer -----------------------------------------------------------------------------------


class Planned(AnyMessage, frozen=True):
    """The running job, for a progress line. A round is `steps_per_round` of the `steps`.
    Each step uses `items` of `item` (such as samples). `done` steps were already done when this was sent. `steps` is 0
    where scripts decide when they end: in jobs of sums, and in stores without `steps=`. Steps have a `loss` always,
    where the script says it, or never (stores).
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
    loss: Literal["always", "said", "never"] = "always"


class StepDone(AnyMessage, frozen=True):
    """All replicas have reported `step` (under local steps: the round that ends with it).

    `loss` is their weighted mean. `again` counts repeated reports so far: work that was done twice.
    `lr` is its learning rate (None: the script's own optimizer steps); `figures` are those of `micro.log`. `computed`
    is how many seconds the slowest replica computed, without waiting for parameters; 0: not known.
    """

    step: int
    loss: float
    items: int
    again: int = 0
    lr: float | None = None
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    computed: float = 0.0

    def has_loss(self, plan: Planned) -> bool:
        """False if nobody has said a loss of this step, so that `loss` says nothing."""
        return plan.loss == "always" or (plan.loss == "said" and not math.isnan(self.loss))


class Metrics(AnyMessage, frozen=True):
    """The figures of all evaluations after `step` steps of training, in that generation."""

    step: Index
    values: Figures
    generation: ViewNumber = ViewNumber()


class Waiting(Shown, frozen=True):
    """What the job waits for, as a sentence (I8)."""

    text: str


class Members(AnyMessage, frozen=True):
    """The members of a new view, for observers. `exposed` counts the shards that only one server holds. `through`:
    worker -> the aggregator that it may use. `warming`: those of `standby` that fetch a version, and compute soon."""

    view: str
    workers: tuple[str, ...]
    standby: tuple[str, ...]
    servers: tuple[str, ...]
    exposed: int = 0
    aggregators: tuple[str, ...] = ()
    through: dict[str, str] = msgspec.field(default_factory=dict)
    warming: tuple[str, ...] = ()


class SnapshotEvery(AnyMessage, frozen=True):
    """A snapshot is taken every so many `seconds` from now on: the job has chosen that (``tune="auto"``)."""

    seconds: float


class Snapshotted(AnyMessage, frozen=True):
    """A snapshot is complete and durable. `nbytes` is its size; `seconds` is how long it took."""

    snapshot: str
    version: int
    nbytes: int
    seconds: float


# ---- all of them ----------------------------------------------------------------------------------------------------

OfViews = NewView | ViewChange
Message = (
    Challenge | Hello | Welcome | Refused | Propose | Beat | Report | Applied | Accounted | CaughtUp | Disproved |
    Leaving | Stored | NotStored | SnapshotWanted | Resize | Metrics | Say | Skipped | Stop | Done | GiveUp | Admitted |
    Prepare | OfViews | Assist | Capture | Finished | Aborted | Planned | StepDone | Waiting | Members |
    SnapshotEvery | Snapshotted | Knows | Held | Release | Evaluates | Evaluated | Contributed | Updated |
    AuditFound | OfMembers | AnyOrder | Ordered | Reached | Unrestored
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_M = TypeVar("_M")


def with_secrets(message: Message, change: Callable[[bytes], bytes]) -> Message:
    """The message, with each secret in it changed: encrypted before it is sent, or decrypted when it has come."""
    match message:
        case Admitted(secret=secret):
            return msgspec.structs.replace(message, secret=change(secret))
        case NewView(tickets=tickets) | ViewChange(tickets=tickets):
            return msgspec.structs.replace(message, tickets={id: change(one) for id, one in tickets.items()})
        case _:
            return message


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decode a message. ProtocolError if the bytes are no message."""
    try:
        message: Message = _decoder.decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a control message that cannot be read: {printable(str(error))}") from None


def expect(data: bytes | bytearray | memoryview, kind: type[_M]) -> _M:
    """Decode a message that must be a `kind`. ProtocolError otherwise."""
    message = decode(data)
    if not isinstance(message, kind):
        raise ProtocolError(f"a {type(message).__name__} message where {kind.__name__} was expected")
    return message
