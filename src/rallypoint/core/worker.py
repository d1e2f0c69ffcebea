"""The worker's machine: what to compute next, what to send, which arriving versions to take, when to install them.

A worker has one *slot* per shard, a range of one exchange buffer as long as the model. A slot carries a gradient on its
way up and then, in the same bytes, the new parameters on their way down: version t+1 of a shard cannot exist before
this worker's own contributions to step t have been received, so the two never need the memory at the same time. When
they would (somebody else has computed our replica too), the arriving version is let go and fetched later (I5).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class Slot(enum.Enum):
    """What a slot's bytes are."""

    FREE = "free"  # nothing of value: the next gradient may be written, the next version may land
    QUEUED = "queued"  # a gradient waiting for its turn on the link, or being sent
    LANDING = "landing"  # the new version is being received into it
    LANDED = "landed"  # the new version, whole


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filled:
    """The gradient of `shard` for the replica in progress is whole and in its slot."""

    shard: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The slot's gradient of `step` has left: its bytes may be used again."""

    shard: int
    step: int


@dataclass(frozen=True, slots=True)
class ReplicaComputed:
    """The backward pass of the replica in progress is over."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """A server is about to deliver a version of a shard."""

    shard: int
    version: int


@dataclass(frozen=True, slots=True)
class Landed:
    """The version that was allowed to land is whole."""

    shard: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The model holds the landed version: the next step may begin."""


Event = Filled | Sent | ReplicaComputed | Arriving | Landed | Installed


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send the slot as this replica's contribution."""

    shard: int
    step: int
    replica: int


@dataclass(frozen=True, slots=True)
class Land:
    """Receive the arriving version into its slot."""

    shard: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Read the arriving version and forget it."""

    shard: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask the shard's server for a version that was discarded when it came."""

    shard: int
    version: int


@dataclass(frozen=True, slots=True)
class Install:
    """All shards of `version` have landed: copy them into the model."""

    version: int


Effect = Send | Land | Discard | Fetch | Install


@dataclass(slots=True)
class WorkerMachine:
    """One worker's part in a synchronous job.

    `shards` is the number of shards; `buffer_shards` those to which only replica 0 contributes; `replicas` what this
    worker computes at every step, ascending; `steps` the job's last version. `step` is -1 until version 0 is installed.

    A server waits for this worker's contributions before it goes on, except where the worker has none to make: another
    replica's buffers may run one version ahead of us (kept by the server for exactly that, I5, and fetched when we get
    there), and a worker without replicas may be left behind altogether, so it waits for the last version only.
    """

    shards: int
    buffer_shards: frozenset[int]
    replicas: Sequence[int]
    steps: int
    step: int = -1
    _slots: list[Slot] = field(init=False)
    _computed: int = 0  # replicas of this step whose backward is over
    _landed: int = 0
    _sent_by: list[int] = field(init=False)  # contributions queued for each shard in this step
    _missed: set[int] = field(default_factory=set)  # of the wanted version, let go when they came
    _early: set[int] = field(default_factory=set)  # of the version after it, likewise

    def __post_init__(self) -> None:
        self._slots = [Slot.FREE] * self.shards
        self._sent_by = [0] * self.shards

    # ---- questions the shell asks ----

    @property
    def wanted(self) -> int:
        """The version to install next."""
        return self.step + 1 if self.replicas else self.steps

    @property
    def next_replica(self) -> int | None:
        """The replica to compute now; None when this step's are done (or version 0 has not come)."""
        if self.step < 0 or self._computed == len(self.replicas):
            return None
        return self.replicas[self._computed]

    def contributes(self, shard: int, replica: int) -> bool:
        """Does this replica contribute to that shard?"""
        return shard not in self.buffer_shards or replica == 0

    def may_fill(self, shard: int) -> bool:
        """May a gradient be written into the slot now?"""
        return self._slots[shard] is Slot.FREE

    @property
    def missing(self) -> list[int]:
        """Shards whose next version is not here."""
        return [shard for shard, slot in enumerate(self._slots) if slot is not Slot.LANDED]

    @property
    def unsent(self) -> list[int]:
        """Shards whose gradient has not left."""
        return [shard for shard, slot in enumerate(self._slots) if slot is Slot.QUEUED]

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; the effects are to be run in order."""
        match event:
            case Filled(shard=shard):
                return self._filled(shard)
            case Sent(shard=shard, step=step):
                # The next version, and even the next step, may be quicker than this news.
                if step == self.step and self._slots[shard] is Slot.QUEUED:
                    self._slots[shard] = Slot.FREE
                return []
            case ReplicaComputed():
                self._computed += 1
                return self._fetch_missed()
            case Arriving(shard=shard, version=version):
                return self._arriving(shard, version)
            case Landed(shard=shard):
                self._slots[shard] = Slot.LANDED
                self._landed += 1
                return [Install(self.wanted)] if self._landed == self.shards else []
            case Installed():
                return self._begin_step(self.wanted)

    def _filled(self, shard: int) -> list[Effect]:
        replica = self.next_replica
        if replica is None or not self.contributes(shard, replica):
            return []
        self._slots[shard] = Slot.QUEUED
        self._sent_by[shard] += 1
        return [Send(shard, self.step, replica)]

    def _arriving(self, shard: int, version: int) -> list[Effect]:
        if version == self.wanted + 1:
            self._early.add(shard)
        if version != self.wanted or self._slots[shard] in (Slot.LANDING, Slot.LANDED):
            return [Discard(shard)]
        if self._sent_by[shard] < self._owed(shard):
            self._missed.add(shard)
            return [Discard(shard)]
        # A slot still QUEUED is no obstacle: that the version exists means the server needs nothing more from this
        # step, so whatever else leaves from these bytes will be dropped as a repeat (I2).
        self._missed.discard(shard)
        self._slots[shard] = Slot.LANDING
        return [Land(shard)]

    def _owed(self, shard: int) -> int:
        if self.step < 0:
            return 0
        return sum(self.contributes(shard, replica) for replica in self.replicas)

    def _fetch_missed(self) -> list[Effect]:
        if self.next_replica is not None:
            return []
        return [Fetch(shard, self.wanted) for shard in sorted(self._missed)]

    def _begin_step(self, step: int) -> list[Effect]:
        self.step = step
        self._slots = [Slot.FREE] * self.shards
        self._sent_by = [0] * self.shards
        self._computed = self._landed = 0
        self._missed.clear()
        early, self._early = sorted(self._early), set()
        return [Fetch(shard, self.wanted) for shard in early]
