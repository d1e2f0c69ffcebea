"""What both of a worker's machines have in common: slots, events, effects, actions.

A worker has one *slot* per shard, a range of one exchange buffer as long as the model. A slot carries a gradient on its
way up and then, in the same bytes, the new parameters on their way down.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
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
    """A server is about to deliver a version of a shard, under the number of a view.

    Under a streaming policy it is what was wanted for `replica`'s step `clock`. A version that is not `whole` only says
    what follows from the one before (AllReduce): nobody can begin with it. What `begins` is what all begin with there.
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


@dataclass(frozen=True, slots=True)
class Want:
    """Ask a shard's server for the parameters for `replica`'s next step (or EVERYTHING), when it may have them."""

    shard: int
    replica: int
    server: str


Effect = Send | Land | Discard | Fetch | Follow | Want


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
    """Store a share of a snapshot: the model has come to its version, or past it. Every n-th shard, from this worker's
    place among the n `writers` on."""

    snapshot: str
    version: int
    writers: tuple[str, ...]


Action = Initialise | Compute | Install


@dataclass(slots=True)
class SlotMachine(ABC):
    """One worker's part in a job: what its two machines share.

    `shards` is the number of shards; `buffer_shards` those to which only replica 0 contributes; `steps` the last one.
    `step` is the one that the model is for, -1 before the first.
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
    _serials: list[int] = field(init=False)  # of the gradient that is queued in a slot
    _serial: int = 0
    _computing: int | None = None
    _initialise: bool = False
    _links: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._slots = [Slot.FREE] * self.shards
        self._serials = [0] * self.shards

    def contributes(self, shard: int, replica: int) -> bool:
        """Does this replica contribute to that shard?"""
        return shard not in self.buffer_shards or replica == 0

    @property
    def unsent(self) -> list[int]:
        """Shards whose gradient has not left."""
        return [shard for shard, slot in enumerate(self._slots) if slot is Slot.QUEUED]

    @abstractmethod
    def next_action(self) -> Action | None:
        """What the main thread is to do now; None when it has to wait."""

    def take(self, action: Action | None) -> bool:
        """The main thread takes up what it was told to do; False if meanwhile something else is to be done, or nothing.

        While it copies what has landed, until it is Installed, no slot is written.
        """
        if action is None or action != self.next_action():
            return False
        match action:
            case Initialise():
                self._initialise = False
            case Install(version=version):
                self._begin_install(version)
            case Compute(replica=replica):
                self._computing, self.rewound = replica, False
                self._begin_replica(replica)
        return True

    @abstractmethod
    def _begin_install(self, version: int) -> None: ...

    @abstractmethod
    def _begin_replica(self, replica: int) -> None: ...

    def is_queued(self, shard: int, serial: int) -> bool:
        """Does the slot still hold the gradient that was to be sent under this number?"""
        return self._slots[shard] is Slot.QUEUED and self._serials[shard] == serial

    def fill(self, shard: int) -> None:
        """The main thread begins to write the slot (`may_fill` has said that it may)."""
        self._slots[shard] = Slot.FILLING

    @property
    def _may_initialise(self) -> bool:
        return self.view is not None and all(server.id in self._links for server in self.view.servers)

    def _sent(self, shard: int, serial: int) -> None:
        # Late news, of a gradient that has made way since, must not free what is in the slot now.
        if self.is_queued(shard, serial):
            self._slots[shard] = Slot.FREE

    def _queue(self, shard: int) -> int:
        """The slot's gradient waits for its turn; its serial number."""
        self._slots[shard] = Slot.QUEUED
        self._serial += 1
        self._serials[shard] = self._serial
        return self._serial

    def _let_go(self) -> None:
        """Nobody writes slots any more."""
        self._slots = [Slot.FREE if slot is Slot.FILLING else slot for slot in self._slots]

    def _take_view(self, view: View) -> tuple[View | None, set[str]]:
        """The view becomes the one in force: the one before, and the servers that are still the same processes."""
        before, self.view = self.view, view
        incarnations = {member.id: member.incarnation for member in before.servers} if before is not None else {}
        stayed = {member.id for member in view.servers if incarnations.get(member.id) == member.incarnation}
        self._links &= stayed
        return before, stayed

    def _start_generation(self, view: View) -> None:
        """All members go back to `view.origin`: what this worker holds, and what it is computing, is void."""
        self._links.clear()  # ended, all of them: what was being received is void
        self.step = -1
        self.rewound = self._computing is not None
        # A slot that the main thread is writing stays its own until it has let go.
        self._slots = [Slot.FILLING if slot is Slot.FILLING else Slot.FREE for slot in self._slots]
        self._initialise = view.origin == "" and view.uploader == self.me
        self.following = False  # everything has to be asked for anew

    def _uploads_first_weights(self) -> bool:
        return self.view is not None and not self.view.origin and self.view.uploader == self.me and self.step < 0

    @property
    def uploads(self) -> bool:
        """Does this worker have to bring what all begin with (or has it just done so)?"""
        return self._uploads_first_weights()

    def _moved(self, before: View, view: View, stayed: set[str]) -> list[int]:
        """The shards whose primary is another process now."""
        return [s for s, home in view.primary.items() if before.primary[s] != home or home not in stayed]

    def _at(self, servers: Iterable[str]) -> list[int]:
        """The shards whose primary is one of these."""
        wanted = set(servers)
        return [shard for shard in range(self.shards) if self._home(shard) in wanted]

    @property
    def _number(self) -> ViewNumber:
        return self.view.number if self.view is not None else ViewNumber()

    def _home(self, shard: int) -> str:
        return self.view.primary[shard] if self.view is not None else ""
