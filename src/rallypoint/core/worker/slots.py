"""The words of a worker's machines: slots, events, effects, actions.

A worker has one *slot* per shard, a range of one exchange buffer as long as the model. A slot carries a gradient on its
way up and then, in the same bytes, the new parameters on their way down.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rallypoint.core.view import View, ViewNumber


class Slot(enum.Enum):
    """What a slot's bytes are."""

    FREE = "free"  # nothing of value: a gradient may be written, a version may land
    FILLING = "filling"  # a gradient is being written
    QUEUED = "queued"  # a gradient that waits for room on the link, or is being sent
    LANDING = "landing"  # a version is being received into it
    LANDED = "landed"  # a version, whole


class Slots(list[Slot]):
    """What each shard's slot holds, and under which serial number its gradient is queued."""

    def __init__(self, shards: int) -> None:
        super().__init__([Slot.FREE] * shards)
        self._serials = [0] * shards
        self._serial = 0

    @property
    def unsent(self) -> list[int]:
        """Shards whose gradient has not left."""
        return [shard for shard, slot in enumerate(self) if slot is Slot.QUEUED]

    def queue(self, shard: int) -> int:
        """The slot's gradient waits for room on the link; its serial number."""
        self[shard] = Slot.QUEUED
        self._serial += 1
        self._serials[shard] = self._serial
        return self._serial

    def is_queued(self, shard: int, serial: int) -> bool:
        """Does the slot still hold the gradient that was queued under this number?"""
        return self[shard] is Slot.QUEUED and self._serials[shard] == serial

    def sent(self, shard: int, serial: int) -> None:
        """That gradient has left. News of an older gradient does not free what is in the slot now."""
        if self.is_queued(shard, serial):
            self[shard] = Slot.FREE

    def free_all(self, but: Slot | None = None) -> None:
        """Every slot is free, except those that are `but`."""
        self[:] = [slot if slot is but else Slot.FREE for slot in self]

    def free(self, *kinds: Slot) -> None:
        """Every slot that is one of `kinds` is free."""
        self[:] = [Slot.FREE if slot in kinds else slot for slot in self]

    def has_room(self, shard: int) -> bool:
        """May a version land? A gradient that is still queued is no obstacle.

        That the version exists means that the server needs nothing more from this step: whatever else leaves from these
        bytes will be dropped as a repeat (I2).
        """
        return self[shard] in (Slot.FREE, Slot.QUEUED)

    def validate(self) -> None:
        """AssertionError if two queued gradients have one serial number."""
        queued = [self._serials[shard] for shard in self.unsent]
        assert len(queued) == len(set(queued)), f"queued gradients share a serial number: {queued}"


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Viewed:
    """A new view. Links to servers that it replaces have ended: their threads touch no slot any more."""

    view: View


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link to a server stands."""

    server: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to a server has ended, and its threads touch no slot any more."""

    server: str


@dataclass(frozen=True, slots=True)
class Assisted:
    """The coordinator asks for one more replica of a step: a straggler's (a backup task)."""

    step: int
    replica: int


@dataclass(frozen=True, slots=True)
class Filled:
    """The gradient of `shard` for the replica in progress is whole and in its slot."""

    shard: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The gradient that was queued under this serial number has left: its bytes may be used again."""

    shard: int
    serial: int


@dataclass(frozen=True, slots=True)
class ReplicaComputed:
    """The backward pass of the replica in progress is over."""


@dataclass(frozen=True, slots=True)
class ReplicaAbandoned:
    """The main thread has stopped computing the replica halfway: nobody writes slots any more."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """A server is about to deliver a version of a shard, under the number of a view.

    Under a streaming policy it is what was wanted for `replica`'s step `clock`. A version that is not `whole` is only
    an update to the version before (AllReduce): no worker can start from it. One that `begins` is a whole state, from
    which all workers start.
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
    """A server says that `replica`, whose next step is `clock`, has to wait for others that are behind."""

    replica: int
    clock: int


@dataclass(frozen=True, slots=True)
class Landed:
    """The version that was allowed to land is whole."""

    shard: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The model holds the landed version: its step may begin."""


Event = (
    Viewed | LinkUp | LinkLost | Assisted | Filled | Sent | ReplicaComputed | ReplicaAbandoned | Arriving | ToWait
    | Landed | Installed
)  # fmt: skip


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send the slot to `server` as this replica's contribution, under that view; `serial` comes back in Sent.

    Under a streaming policy it was computed from version `base`, and the answer is to be for the replica `wants`.
    """

    shard: int
    step: int
    replica: int
    server: str
    serial: int
    view: ViewNumber
    base: int = 0
    wants: int | None = None


@dataclass(frozen=True, slots=True)
class Land:
    """Receive the arriving version into its slot."""

    shard: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Read the arriving version and drop it."""

    shard: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask a shard's server for a version that could not be taken when it came."""

    shard: int
    version: int
    server: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Ask a server for its shards' newest versions, and each one from now on; or (not `on`) for no more."""

    server: str
    on: bool = True


@dataclass(frozen=True, slots=True)
class Want:
    """Ask a shard's server for the parameters for `replica`'s next step (or EVERYTHING), when it may have them."""

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
class Release:
    """Take the codec state of a replica that this worker computes no more out of its encoder, and keep it to give."""

    shard: int
    replica: int


@dataclass(frozen=True, slots=True)
class Give:
    """Send what was released (or the word that there is nothing new) to the shard's primary."""

    shard: int
    replica: int
    server: str


@dataclass(frozen=True, slots=True)
class ResetCodecs:
    """There was a roll-back: the encoder forgets all of its codec states."""


CodecEffect = Recall | Release | Give | ResetCodecs
Effect = Send | Land | Discard | Fetch | Follow | Want | CodecEffect


# ---- what to do next -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Initialise:
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
class Store:
    """Store a share of a snapshot: the model is at its version, or past it.

    This worker's share is every n-th shard, starting at its place among the n `writers`.
    """

    snapshot: str
    version: int
    writers: tuple[str, ...]


Action = Initialise | Compute | Install
