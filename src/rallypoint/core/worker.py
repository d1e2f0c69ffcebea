"""The worker's machine: what to compute next, what to send, which arriving versions to take, when to install them.

A worker has one *slot* per shard, a range of one exchange buffer as long as the model. A slot carries a gradient on its
way up and then, in the same bytes, the new parameters on their way down. When a version comes while its slot is being
written (somebody else has computed our replica too), it is let go and fetched later (I5).

Nothing here is ever repaired; it is done again (I2). A link that broke, a server that was replaced, a replica that
changed hands: each only changes what this worker knows to have reached the shard's primary, and whatever has not is
computed and sent once more. The model itself holds the version of the step in progress until every shard of the next
one has come, so there is nothing to rewind for that.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.core.view import View, ViewNumber


class Slot(enum.Enum):
    """What a slot's bytes are."""

    FREE = "free"  # nothing of value: a gradient may be written, a version may land
    FILLING = "filling"  # a gradient is being written
    QUEUED = "queued"  # a gradient waiting for its turn on the link, or being sent
    LANDING = "landing"  # a version is being received into it
    LANDED = "landed"  # a version, whole


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Viewed:
    """A new view. Links to servers that it replaces have been ended: their threads touch no slot any more."""

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
    """The gradient that was sent under this serial number has left: its bytes may be used again."""

    shard: int
    serial: int


@dataclass(frozen=True, slots=True)
class ReplicaComputed:
    """The backward pass of the replica in progress is over."""


@dataclass(frozen=True, slots=True)
class ReplicaAbandoned:
    """The replica in progress was given up halfway: nobody writes slots any more."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """A server is about to deliver a version of a shard, under the number of a view."""

    shard: int
    version: int
    view: ViewNumber


@dataclass(frozen=True, slots=True)
class Landed:
    """The version that was allowed to land is whole."""

    shard: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The model holds the landed version: its step may begin."""


Event = (
    Viewed | LinkUp | LinkLost | Assisted | Filled | Sent | ReplicaComputed | ReplicaAbandoned | Arriving | Landed
    | Installed
)  # fmt: skip


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send the slot to `server` as this replica's contribution, under that view; `serial` comes back in Sent."""

    shard: int
    step: int
    replica: int
    server: str
    serial: int
    view: ViewNumber


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
    """Ask a shard's server for a version that could not be taken when it came."""

    shard: int
    version: int
    server: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Ask a server for its shards' newest versions, and each one from now on; or (not `on`) for no more."""

    server: str
    on: bool = True


Effect = Send | Land | Discard | Fetch | Follow


# ---- what to do next -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Initialise:
    """Push the model's own weights as version 0 of everything."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute this replica of the step in progress."""

    step: int
    replica: int


@dataclass(frozen=True, slots=True)
class Install:
    """All shards of `version` have landed: copy them into the model."""

    version: int


Action = Initialise | Compute | Install


@dataclass(slots=True)
class WorkerMachine:
    """One worker's part in a synchronous job.

    `shards` is the number of shards; `buffer_shards` those to which only replica 0 contributes; `steps` the job's last
    version. `step` is the version that the model holds, -1 before the first.
    """

    me: str
    shards: int
    buffer_shards: frozenset[int]
    steps: int
    step: int = -1
    view: View | None = None
    rewound: bool = False  # the replica in progress belongs to a past that is void
    following: bool = False
    _slots: list[Slot] = field(init=False)
    _held: list[int] = field(init=False)  # the version in a slot that is landing or landed
    _newest: list[int] = field(init=False)  # the newest version known to exist, -1 when nothing is known
    _asked: list[int] = field(init=False)  # the version that was fetched and has not come
    _serials: list[int] = field(init=False)  # of the gradient that is queued in a slot
    _delivered: list[set[int]] = field(init=False)  # replicas of this step sent to the shard's primary
    _serial: int = 0
    _computing: int | None = None
    _wanted: frozenset[int] = frozenset()  # the shards that the replica in progress is computed for
    _assists: set[int] = field(default_factory=set)
    _initialise: bool = False
    _installing: int = -1  # the version that the main thread is copying out of the slots
    _links: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._slots = [Slot.FREE] * self.shards
        self._held = [-1] * self.shards
        self._newest = [-1] * self.shards
        self._asked = [-1] * self.shards
        self._serials = [0] * self.shards
        self._delivered = [set() for _ in range(self.shards)]

    # ---- questions the shell asks ----

    @property
    def target(self) -> int:
        """The version to install next: the following one, or a later one if all have moved on; -1 if unknown.

        Nobody pushes for step t+1 before having all shards at t+1. So when every shard is known at t+1 or later, the
        contributions to step t are all in, and this worker's own part of it is needed by nobody.
        """
        if self._installing >= 0:
            return self._installing
        known = min(self._newest)
        return -1 if known < 0 else max(self.step + 1, known)

    def next_action(self) -> Action | None:
        """What the main thread is to do now; None when it has to wait."""
        if self._initialise:
            if self.view is not None and all(server.id in self._links for server in self.view.servers):
                return Initialise()
            return None
        if self._ready():
            return Install(self.target)
        if not 0 <= self.step < self.steps or min(self._newest) < 0:
            return None  # (or nothing has been heard for a while: this step may be long over)
        for replica in self.hand:
            if self._needed_by(replica):
                return Compute(self.step, replica)
        return None

    @property
    def hand(self) -> Sequence[int]:
        """The replicas to compute at the step in progress, ascending."""
        own = self.view.hand(self.me, self.step) if self.view is not None else ()
        return sorted({*own, *self._assists})

    def contributes(self, shard: int, replica: int) -> bool:
        """Does this replica contribute to that shard?"""
        return shard not in self.buffer_shards or replica == 0

    def may_fill(self, shard: int) -> bool | None:
        """May the gradient be written into the slot now? None: it need not be written at all."""
        if self._slots[shard] is Slot.FILLING:
            return True
        if shard not in self._wanted or self._newest[shard] > self.step:
            return None
        return self._slots[shard] is Slot.FREE

    @property
    def missing(self) -> list[int]:
        """Shards whose next version is not here."""
        target = self.target
        return [s for s in range(self.shards) if self._slots[s] is not Slot.LANDED or self._held[s] != target]

    @property
    def unsent(self) -> list[int]:
        """Shards whose gradient has not left."""
        return [shard for shard, slot in enumerate(self._slots) if slot is Slot.QUEUED]

    # ---- what the main thread does ----

    def begin(self, replica: int) -> None:
        """The main thread begins to compute this replica of the step in progress."""
        self._computing = replica
        self._wanted = frozenset(self._needed_by(replica))
        self.rewound = False

    def install(self) -> None:
        """The main thread begins to copy what has landed: until it is Installed no slot is written."""
        self._installing = self.target

    def fill(self, shard: int) -> None:
        """The main thread begins to write the slot (`may_fill` has said that it may)."""
        self._slots[shard] = Slot.FILLING

    def initialised(self) -> None:
        """Version 0 has been handed to every link."""
        self._initialise = False

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; the effects are to be run in order."""
        match event:
            case Filled(shard=shard):
                return self._filled(shard)
            case Sent(shard=shard, serial=serial):
                # Late news, of a gradient that has made way since, must not free what is in the slot now.
                if self._slots[shard] is Slot.QUEUED and self._serials[shard] == serial:
                    self._slots[shard] = Slot.FREE
                return []
            case ReplicaComputed() | ReplicaAbandoned():
                return self._end_replica()
            case Arriving():
                return self._arriving(event)
            case Landed(shard=shard):
                if self._slots[shard] is Slot.LANDING:
                    self._slots[shard] = Slot.LANDED
                return self._seek() if self._held[shard] != self.target else []
            case Installed():
                if self._installing < 0:
                    return []  # rewound meanwhile
                version, self._installing = self._installing, -1
                return self._begin_step(version)
            case Assisted(step=step, replica=replica):
                if step == self.step:
                    self._assists.add(replica)
                return []
            case LinkUp(server=server):
                self._links.add(server)
                return [Follow(server)] if self.following else []
            case LinkLost(server=server):
                self._links.discard(server)
                self._initialise = self._initialise or self._first_weights_lost(server)
                self._forget(s for s in range(self.shards) if self._home(s) == server)
                return []
            case Viewed(view=view):
                return self._viewed(view)

    def _filled(self, shard: int) -> list[Effect]:
        home = self._home(shard)
        if self._computing is None or self.rewound or home not in self._links or self._newest[shard] > self.step:
            self._slots[shard] = Slot.FREE
            return self._seek()
        self._slots[shard] = Slot.QUEUED
        self._serial += 1
        self._serials[shard] = self._serial
        self._delivered[shard].add(self._computing)
        return [Send(shard, self.step, self._computing, home, self._serial, self._number)]

    def _end_replica(self) -> list[Effect]:
        self._computing, self._wanted, self.rewound = None, frozenset(), False
        self._slots = [Slot.FREE if slot is Slot.FILLING else slot for slot in self._slots]
        return self._seek()

    def _arriving(self, event: Arriving) -> list[Effect]:
        shard, version = event.shard, event.version
        if self.view is None or event.view < self.view.since:
            return [Discard(shard)]
        before = self.target
        self._newest[shard] = max(self._newest[shard], version)
        target = self.target
        if self._asked[shard] == version:
            self._asked[shard] = -1
        # A slot still QUEUED is no obstacle: that the version exists means the server needs nothing more from this
        # step, so whatever else leaves from these bytes will be dropped as a repeat (I2).
        has_room = self._slots[shard] in (Slot.FREE, Slot.QUEUED) or (
            self._slots[shard] is Slot.LANDED and self._held[shard] != target
        )
        # Before anything is known of the other shards (the first version, a late joiner), take what comes.
        if has_room and version > self.step and target in (-1, version):
            self._slots[shard] = Slot.LANDING
            self._held[shard] = version
            landing: list[Effect] = [Land(shard)]
            return landing if target == before else [*landing, *self._seek()]
        return [Discard(shard), *self._seek()]

    def _begin_step(self, step: int) -> list[Effect]:
        self.step = step
        self._slots = [Slot.FREE] * self.shards
        self._held = [-1] * self.shards
        self._asked = [-1] * self.shards
        self._delivered = [set() for _ in range(self.shards)]
        self._assists.clear()
        return self._seek()

    def _viewed(self, view: View) -> list[Effect]:
        if self.view is not None and view.number <= self.view.number:
            return []
        before, self.view = self.view, view
        births = {member.id: member.birth for member in before.servers} if before is not None else {}
        stayed = {member.id for member in view.servers if births.get(member.id) == member.birth}
        self._links &= stayed
        if before is None or before.since != view.since:
            self._links.clear()  # ended, all of them: what was being received is void
            self._rewind(view)
        else:
            self._forget(
                shard for shard, home in view.primary.items() if before.primary[shard] != home or home not in stayed
            )
        return [*self._follow_or_not(view), *self._seek()]

    def _rewind(self, view: View) -> None:
        """All members go back to `view.origin`: what this worker holds, and what it is computing, is void."""
        self.step = self._installing = -1
        self.rewound = self._computing is not None
        self._wanted = frozenset()
        # A slot that the main thread is writing stays its own until it has let go.
        self._slots = [Slot.FILLING if slot is Slot.FILLING else Slot.FREE for slot in self._slots]
        self._held = [-1] * self.shards
        self._newest = [-1] * self.shards
        self._asked = [-1] * self.shards
        self._delivered = [set() for _ in range(self.shards)]
        self._assists.clear()
        self._initialise = view.origin == "" and view.first == self.me
        self.following = False  # everything has to be asked for anew

    def _first_weights_lost(self, server: str) -> bool:
        if self.view is None or self.view.origin or self.view.first != self.me or self.step >= 0:
            return False
        return any(self._newest[s] < 0 and self._home(s) == server for s in range(self.shards))

    def _follow_or_not(self, view: View) -> list[Effect]:
        following = view.ending or view.takes_part(self.me, self.step)
        if following == self.following:
            return []
        self.following = following
        if following:
            self._newest = [-1] * self.shards  # nothing was heard for a while
        return [Follow(server, following) for server in sorted(self._links)]

    def _forget(self, shards: Iterable[int]) -> None:
        """Nothing is known to have reached these shards' primary; what was under way to or from it is lost."""
        for shard in shards:
            self._delivered[shard].clear()
            self._asked[shard] = -1
            if self._slots[shard] in (Slot.QUEUED, Slot.LANDING):
                self._slots[shard] = Slot.FREE

    @property
    def _number(self) -> ViewNumber:
        return self.view.number if self.view is not None else ViewNumber()

    def _home(self, shard: int) -> str:
        return self.view.primary[shard] if self.view is not None else ""

    def _ready(self) -> bool:
        target = self.target
        if target < 0 or self._computing is not None:
            return False
        return all(
            slot is Slot.LANDED and held == target for slot, held in zip(self._slots, self._held, strict=True)
        )

    def _needed_by(self, replica: int) -> list[int]:
        """The shards that have not had this replica's contribution to the step in progress from us, and still may."""
        return [
            shard for shard in range(self.shards)
            if self._newest[shard] <= self.step and replica not in self._delivered[shard]
            and self.contributes(shard, replica) and self._home(shard) in self._links
        ]  # fmt: skip

    def _seek(self) -> list[Effect]:
        """Fetch what exists of the target, is not here, and is not coming by itself."""
        target = self.target
        if target < 0 or not self.following:
            return []
        effects: list[Effect] = []
        for shard, slot in enumerate(self._slots):
            has_room = slot in (Slot.FREE, Slot.QUEUED) or (slot is Slot.LANDED and self._held[shard] != target)
            known = self._newest[shard] >= target and self._asked[shard] != target
            if has_room and known and self._home(shard) in self._links:
                self._asked[shard] = target
                effects.append(Fetch(shard, target, self._home(shard)))
        return effects
