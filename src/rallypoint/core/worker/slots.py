"""The types of a worker's machines: slots, events, effects, actions.

A worker has one *slot* per shard: the shard's range of an exchange buffer that is as long as the model. The same bytes
hold first the gradient that the worker sends, then the new parameters that it receives:

    FREE -> FILLING -> QUEUED -> FREE      a gradient is written, waits, is sent
    FREE -> LANDING -> LANDED -> FREE      a version is received, is complete, is installed
    LANDED -> OLD -> FREE                  the same, where a forward pass begins early (`core/worker/overlap.py`)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rallypoint.core.sums import Part
from rallypoint.core.view import View, ViewNumber


class Slot(enum.Enum):
    """What a slot's bytes hold."""

    FREE = "free"  # nothing: a gradient may be written, a version may land
    FILLING = "filling"  # a gradient is being written
    QUEUED = "queued"  # a gradient that waits for the link, or is being sent
    LANDING = "landing"  # a version is being received into it
    LANDED = "landed"  # a complete version
    OLD = "old"  # what the model held before; the main thread swaps, or has swapped, it with the version that landed


class Slots(list[Slot]):
    """The state of each shard's slot, and the serial number of its queued gradient."""

    def __init__(self, shards: int) -> None:
        super().__init__([Slot.FREE] * shards)
        self._serials = [0] * shards
        self._serial = 0

    @property
    def unsent(self) -> list[int]:
        """The shards whose gradient is queued and has not been sent."""
        return [shard for shard, slot in enumerate(self) if slot is Slot.QUEUED]

    def queue(self, shard: int) -> int:
        """Queue the slot's gradient for sending. Returns its serial number, which is new for each call."""
        self[shard] = Slot.QUEUED
        self._serial += 1
        self._serials[shard] = self._serial
        return self._serial

    def is_queued(self, shard: int, serial: int) -> bool:
        """True if the slot still holds the gradient that was queued with this serial number."""
        return self[shard] is Slot.QUEUED and self._serials[shard] == serial

    def sent(self, shard: int, serial: int) -> None:
        """Free the slot after its gradient was sent. Does nothing if the slot holds something newer."""
        if self.is_queued(shard, serial):
            self[shard] = Slot.FREE

    def free_all(self, *but: Slot) -> None:
        """Free every slot, except those in one of the states `but`."""
        self[:] = [slot if slot in but else Slot.FREE for slot in self]

    def free(self, *kinds: Slot) -> None:
        """Free every slot that is in one of the states `kinds`."""
        self[:] = [Slot.FREE if slot in kinds else slot for slot in self]

    def has_room(self, shard: int) -> bool:
        """True if a version may land in the slot. Not over a queued gradient: its frame may be on its way.

        The server does not need that gradient any more (a quorum, a backup task). But bytes that change while they are
        sent would break the link. The version is fetched once the gradient has left.
        """
        return self[shard] is Slot.FREE

    def validate(self) -> None:
        """Raise AssertionError if two queued gradients have the same serial number."""
        queued = [self._serials[shard] for shard in self.unsent]
        assert len(queued) == len(set(queued)), f"queued gradients share a serial number: {queued}"


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Viewed:
    """A new view. Links to servers that it replaces have ended already: their threads use no slot any more."""

    view: View


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link to a server is up."""

    server: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to a server has ended; its threads use no slot any more."""

    server: str


@dataclass(frozen=True, slots=True)
class Assisted:
    """The coordinator asks this worker to compute a straggler's replica too (a backup task)."""

    step: int
    replica: int


@dataclass(frozen=True, slots=True)
class Filled:
    """The slot of `shard` holds the complete gradient of the replica in progress; `part`: added up as that says."""

    shard: int
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """The gradient that was queued with this serial number was sent: its bytes may be used again."""

    shard: int
    serial: int


@dataclass(frozen=True, slots=True)
class ReplicaComputed:
    """The backward pass of the replica in progress is over."""


@dataclass(frozen=True, slots=True)
class ReplicaAbandoned:
    """The main thread stopped computing the replica before its end, and writes no slot now."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """The header of a shard's version has arrived; its payload follows.

    Attributes:
        version: the shard's own version.
        view: the number of the server's view.
        replica, clock: under a streaming policy, the parameters are for this replica's step `clock`.
        whole: False if the payload is only an update to the version before (AllReduce): no worker can start from it.
        begins: the payload is the complete state with which a generation begins.
    """

    shard: int
    version: int
    view: ViewNumber
    replica: int = 0
    clock: int = 0
    whole: bool = True
    begins: bool = False


@dataclass(frozen=True, slots=True)
class ToWait:
    """A server says that `replica`, whose next step is `clock`, has to wait for slower replicas."""

    replica: int
    clock: int


@dataclass(frozen=True, slots=True)
class Landed:
    """The version that the effect `Land` allowed has been received completely."""

    shard: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The main thread has copied the landed version into the model: its step may begin."""


Event = (
    Viewed | LinkUp | LinkLost | Assisted | Filled | Sent | ReplicaComputed | ReplicaAbandoned | Arriving | ToWait
    | Landed | Installed
)  # fmt: skip


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send the slot to `server` as this replica's contribution, with that view's number; then report `Sent(serial)`.

    `step` is the shard's own version. The slot is the sum of `count` replicas, the first of which is `replica`. Under a
    streaming policy the contribution was computed from the shard's version `base`, and the server answers with the
    parameters for the replica `wants` (None: no answer).
    """

    shard: int
    step: int
    replica: int
    server: str
    serial: int
    view: ViewNumber
    base: int = 0
    wants: int | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Land:
    """Receive the arriving version into its slot."""

    shard: int


@dataclass(frozen=True, slots=True)
class DropArriving:
    """Read the arriving version's payload and drop it."""

    shard: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask a shard's server for a version that was discarded, or missed, when it was sent."""

    shard: int
    version: int
    server: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Ask a server for the newest version of each of its shards and for each later one; with `on=False`: for no more.

    An aggregator is told that all contributions from round `step` on go through it.
    """

    server: str
    on: bool = True
    step: int = 0


@dataclass(frozen=True, slots=True)
class AskNext:
    """Ask a shard's server for the parameters of `replica`'s next step; it answers when its policy allows.

    With EVERYTHING in place of a replica: the parameters after the job's last step.
    """

    shard: int
    replica: int
    server: str


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask the shard's primary for the codec state of a replica that this worker is about to compute."""

    shard: int
    replica: int
    server: str


@dataclass(frozen=True, slots=True)
class ReleaseState:
    """Take the codec state of a replica that this worker no longer computes out of the encoder; keep it for `Give`."""

    shard: int
    replica: int


@dataclass(frozen=True, slots=True)
class Give:
    """Send the released codec state to the shard's primary, or the message that there is nothing new."""

    shard: int
    replica: int
    server: str


@dataclass(frozen=True, slots=True)
class ResetCodecs:
    """Drop all codec states of the encoder: a new generation has begun."""


CodecEffect = Recall | ReleaseState | Give | ResetCodecs
Effect = Send | Land | DropArriving | Fetch | Follow | AskNext | CodecEffect


# ---- what to do next -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UploadFirst:
    """Push the model's own weights as version 0 of everything."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute this replica of this step."""

    step: int
    replica: int


@dataclass(frozen=True, slots=True)
class Install:
    """All shards of `version` have landed: copy them into the model."""

    version: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The model holds `version`, and the job ends with it. Not said again after `Ending.take`."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate `version`, which may not exist yet: it is leased to this worker."""

    version: int


@dataclass(frozen=True, slots=True)
class Store:
    """Store this worker's share of a snapshot: the model is at `version`, or past it.

    The share is every n-th shard. Example: `writers` are (w0, w1, w2); w1 stores shards 1, 4, 7, ...
    """

    snapshot: str
    version: int
    writers: tuple[str, ...]


Action = UploadFirst | Compute | Install
Next = Action | Store | Ended | Evaluate  # what a worker's shell says that comes next
