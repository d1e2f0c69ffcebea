"""What a worker's machines have in common: slots, events, effects, actions, versions in slots, and the base class.

A worker has one *slot* per shard: the shard's range of an exchange buffer that is as long as the model. The same bytes
hold first the gradient that the worker sends, then the new parameters that it receives:

    FREE -> FILLING -> QUEUED -> FREE      a gradient is written, waits, is sent
    FREE -> LANDING -> LANDED -> FREE      a version is received, is complete, is installed
    LANDED -> OLD -> FREE                  the same, where a forward pass begins early (`core/worker/aligned.py`)
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from rallypoint.core.cadence import Cadence
from rallypoint.core.sums import Part, Presum
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

    def validate(self) -> None:
        """Raise AssertionError if two queued gradients have the same serial number."""
        queued = [self._serials[shard] for shard in self.unsent]
        assert len(queued) == len(set(queued)), f"queued gradients share a serial number: {queued}"


# ---- events ----------------------------------------------------------------------------------------------------


class Viewed(msgspec.Struct, frozen=True):
    """A new view. Links to servers that it replaces have ended already: their threads use no slot any more."""

    view: View


class LinkUp(msgspec.Struct, frozen=True):
    """The link to a server is up."""

    server: str


class LinkLost(msgspec.Struct, frozen=True):
    """The link to a server has ended; its threads use no slot any more."""

    server: str


class Assisted(msgspec.Struct, frozen=True):
    """The coordinator asks this worker to compute a straggler's replica too (a backup task)."""

    step: int
    replica: int


class Filled(msgspec.Struct, frozen=True):
    """The slot of `shard` holds the complete gradient of the replica in progress; `part`: added up as that says."""

    shard: int
    part: Part | None = None


class SlotSent(msgspec.Struct, frozen=True):
    """The gradient that was queued with this serial number was sent: its bytes may be used again."""

    shard: int
    serial: int


class ReplicaComputed(msgspec.Struct, frozen=True):
    """The backward pass of the replica in progress is over."""


class ReplicaAbandoned(msgspec.Struct, frozen=True):
    """The main thread stopped computing the replica before its end, and writes no slot now."""


class Arriving(msgspec.Struct, frozen=True):
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


class ToWait(msgspec.Struct, frozen=True):
    """A server says that `replica`, whose next step is `clock`, has to wait for slower replicas."""

    replica: int
    clock: int


class Landed(msgspec.Struct, frozen=True):
    """The version that the effect `Land` allowed has been received completely."""

    shard: int


class Installed(msgspec.Struct, frozen=True):
    """The main thread has copied the landed version into the model: its step may begin."""


Event = (
    Viewed | LinkUp | LinkLost | Assisted | Filled | SlotSent | ReplicaComputed | ReplicaAbandoned | Arriving | ToWait
    | Landed | Installed
)  # fmt: skip


# ---- effects ---------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send the slot to `server` as this replica's contribution, with that view's number; report `SlotSent(serial)`.

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


class Land(msgspec.Struct, frozen=True):
    """Receive the arriving version into its slot."""

    shard: int


class DropArriving(msgspec.Struct, frozen=True):
    """Read the arriving version's payload and drop it."""

    shard: int


class Fetch(msgspec.Struct, frozen=True):
    """Ask a shard's server for a version that was discarded, or missed, when it was sent."""

    shard: int
    version: int
    server: str


class Follow(msgspec.Struct, frozen=True):
    """Ask a server for the newest version of each of its shards and for each later one; with `on=False`: for no more.

    An aggregator is told that all contributions from round `step` on go through it.
    """

    server: str
    on: bool = True
    step: int = 0


class AskNext(msgspec.Struct, frozen=True):
    """Ask a shard's server for the parameters of `replica`'s next step; it answers when its policy allows.

    With EVERYTHING in place of a replica: the parameters after the job's last step.
    """

    shard: int
    replica: int
    server: str


class Recall(msgspec.Struct, frozen=True):
    """Ask the shard's primary for the codec state of a replica that this worker is about to compute."""

    shard: int
    replica: int
    server: str


class ReleaseState(msgspec.Struct, frozen=True):
    """Take the codec state of a replica that this worker no longer computes out of the encoder; keep it for `Give`."""

    shard: int
    replica: int


class Give(msgspec.Struct, frozen=True):
    """Send the released codec state to the shard's primary, or the message that there is nothing new."""

    shard: int
    replica: int
    server: str


class ResetCodecs(msgspec.Struct, frozen=True):
    """Drop all codec states of the encoder: a new generation has begun."""


class GiveCopy(msgspec.Struct, frozen=True):
    """Send the shard's primary a copy of the codec state with which the contribution to `step` is encoded."""

    shard: int
    replica: int
    step: int
    server: str
    view: ViewNumber


CodecEffect = Recall | ReleaseState | Give | ResetCodecs | GiveCopy
Effect = Send | Land | DropArriving | Fetch | Follow | AskNext | CodecEffect


# ---- what to do next -------------------------------------------------------------------------------------------


class UploadFirst(msgspec.Struct, frozen=True):
    """Push the model's own weights as version 0 of everything."""


class Compute(msgspec.Struct, frozen=True):
    """Compute this replica of this step."""

    step: int
    replica: int


class Install(msgspec.Struct, frozen=True):
    """All shards of `version` have landed: copy them into the model."""

    version: int


class Ended(msgspec.Struct, frozen=True):
    """The model holds `version`, and the job ends with it. Not said again after `Ending.take`."""

    version: int


class Evaluate(msgspec.Struct, frozen=True):
    """Evaluate `version`, which may not exist yet: it is leased to this worker."""

    version: int


class Store(msgspec.Struct, frozen=True):
    """Store this worker's share of a snapshot: the model is at `version`, or past it.

    The share is every n-th shard. Example: `writers` are (w0, w1, w2); w1 stores shards 1, 4, 7, ...
    """

    snapshot: str
    version: int
    writers: tuple[str, ...]


Action = UploadFirst | Compute | Install
Next = Action | Store | Ended | Evaluate  # what a worker's shell says that comes next


# Questions about all shards that are asked at every arrival, answered without a scan of all shards each time.


class Lowest(list[int]):
    """A list of `size` numbers (all `number` at first) that knows its lowest. Numbers can only rise.

    It counts how many there are of each number, which is cheap where many are equal, as versions are.
    """

    def __init__(self, size: int, number: int) -> None:
        super().__init__([number] * size)
        self._counts = Counter(self)
        self.lowest = number  # the initial one if `size` is 0

    def raise_to(self, index: int, number: int) -> None:
        """Raise the number at `index` to `number`; do nothing if it is as high already."""
        before = self[index]
        if number <= before:
            return
        self[index] = number
        self._counts[number] += 1
        self._counts[before] -= 1
        if not self._counts[before]:
            del self._counts[before]
            if before == self.lowest:
                self.lowest = min(self._counts)


class Unanimity:
    """Checks a condition for all of `size` indices, beginning with the index for which it failed the last time.

    While that index still fails, no other is checked: waiting for n shards takes about 3n checks in all instead of n
    at each arrival. The result never depends on an old check: True means that all indices were checked in this call.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._obstacle = 0

    def holds(self, of: Callable[[int], bool]) -> bool:
        """True if `of(index)` is true for every index in 0..size-1."""
        for index in chain(range(self._obstacle, self._size), range(self._obstacle)):
            if not of(index):
                self._obstacle = index
                return False
        return True


class Versions:
    """The versions of each shard. They count the job's rounds; `cadence` converts a shard's own versions to them.

    Attributes:
        newest: the newest version of each shard known to exist; -1 while none is known.
        whole: the newest of these that a worker can start from; -1 while none is known.
        held: the version in each slot that is LANDING or LANDED; without meaning for other slots.
        asked: the version that was fetched and has not come; -1 if none.
    """

    def __init__(self, slots: Slots, cadence: Cadence) -> None:
        self._slots, self._cadence = slots, cadence
        self.newest = self.whole = Lowest(0, -1)
        self.held: list[int] = []
        self.asked: list[int] = []
        self.forget_all()

    def forget_all(self) -> None:
        """Drop everything: a new generation begins."""
        self.unknown()
        self.begin_step()

    def unknown(self) -> None:
        """Drop what is known of existing versions: this worker has not followed the servers for a while."""
        self.newest, self.whole = Lowest(len(self._slots), -1), Lowest(len(self._slots), -1)

    def begin_step(self) -> None:
        """Drop what is known of the slots: the model now holds what was in them."""
        self.held, self.asked = [-1] * len(self._slots), [-1] * len(self._slots)

    def exists(self, shard: int, version: int, *, whole: bool) -> None:
        """Note that a server has this version of `shard`; `whole`: a worker can start from it."""
        self.newest.raise_to(shard, version)
        self.whole.raise_to(shard, version if whole else -1)
        if self.asked[shard] == version:
            self.asked[shard] = -1

    def has_room(self, shard: int, right: int) -> bool:
        """True if version `right` can land: the slot is not in use, or holds another version.

        Not over a queued gradient: its frame may be on its way. The server does not need that gradient any more (a
        quorum, a backup task). But bytes that change while they are sent would break the link. The version is fetched
        once the gradient has left.
        """
        slot = self._slots[shard]
        return slot is Slot.FREE or (slot is Slot.LANDED and self.held[shard] != right)

    def landed(self, shard: int, target: int) -> bool:
        """True if the slot holds the shard's version of `target`."""
        return self._slots[shard] is Slot.LANDED and self.held[shard] == self._cadence.next_due(shard, target)

    def wanted(self, shard: int, target: int) -> bool:
        """True if the shard's version of `target` exists, is not here and was not fetched."""
        right = self._cadence.next_due(shard, target)
        return self.newest[shard] >= right and self.asked[shard] != right and self.has_room(shard, right)

    def validate(self) -> None:
        """Raise AssertionError if a slot holds no known version, or a fetch is for a version not known to exist."""
        whole, newest = self.whole, self.newest
        for shard, slot in enumerate(self._slots):
            known, asked = newest[shard], self.asked[shard]
            if slot is Slot.LANDING or slot is Slot.LANDED:
                assert self.held[shard] >= 0, f"slot {shard} is {slot}, but of no version"
            assert whole[shard] <= known, f"shard {shard}: whole {whole[shard]} is above newest {known}"
            assert asked <= known or known < 0, f"shard {shard}: version {asked} was fetched"


@dataclass(slots=True)
class SlotMachine(ABC):
    """What one worker decides in a job: which replica to compute, what to send, which version to install.

    Pure: no threads, no sockets. The caller makes one call at a time (one thread, or one lock).

    Attributes:
        me: this worker's id.
        shards: the number of shards.
        buffer_shards: the shards to which only one replica contributes: replica 0, or the one in `carried`.
        carried: by shard of carried state, the replica that carries it.
        steps: the number of steps of the job; version `steps` is the last. A view may lower it: see `orders.stop`.
        step: the step that the model's parameters belong to; -1 before the first install.
        view: the view in force; None before the first.
        rewound: the replica in progress belongs to an older generation; its result will not be used.
        following: the servers send this worker each new version.
        presum: what of a step was sent, and what is added up before it is sent (not under a streaming policy).
        landed: by shard, the version that is landing or has landed (only under a streaming policy; else empty).
        in_order: install every version and skip none, because the worker steps the optimizer (AllReduce).
    """

    me: str
    shards: int
    buffer_shards: frozenset[int]
    steps: int
    step: int = -1
    view: View | None = None
    rewound: bool = False
    following: bool = False
    in_order: bool = False
    carried: Mapping[int, int] = field(default_factory=dict)
    presum: Presum = field(default_factory=Presum)
    landed: list[int] = field(default_factory=list)
    _slots: Slots = field(init=False)
    _computing: int | None = None
    _installing: int = -1  # the version that the main thread is copying out of the slots
    _initialise: bool = False
    _links: set[str] = field(default_factory=set)
    _rounds: int = field(init=False)  # `steps`, if nobody stops the job

    def __post_init__(self) -> None:
        self._slots, self._rounds = Slots(self.shards), self.steps

    # ---- questions the shell asks ----

    @abstractmethod
    def next_action(self) -> Action | None:
        """The main thread's next action; None when it has to wait. Changes nothing."""

    @property
    @abstractmethod
    def assigned(self) -> Sequence[int]:
        """The replicas to compute, ascending."""

    @property
    def slots(self) -> Slots:
        return self._slots

    @property
    def computing(self) -> bool:
        return self._computing is not None

    @property
    def reads(self) -> int:
        """The version that the replica in progress reads; not `step` where its forward pass began early."""
        return self.step

    @property
    def takes_part(self) -> bool:
        """True if this worker has replicas, now or at a later step."""
        return bool(self.assigned)

    @property
    def keeps(self) -> frozenset[int]:
        """The replicas whose codec states this worker keeps: those that it may still contribute for."""
        return frozenset(self.assigned)

    @property
    def missing(self) -> list[int]:
        """The shards whose slot holds no complete version."""
        return [shard for shard, slot in enumerate(self._slots) if slot is not Slot.LANDED]

    @property
    def changed(self) -> list[int]:
        """The shards that the install in progress copies into the model."""
        return list(range(self.shards))

    @property
    def row_version(self) -> int | None:
        """The version of table rows that the replica in progress reads; None: the newest."""
        return None

    @property
    def must_upload(self) -> bool:
        """True while the servers still need the first weights and only this worker has them."""
        return self.in_order and self._uploads_first_weights()

    def contributes(self, shard: int, replica: int) -> bool:
        """True if `replica` contributes to `shard`: every replica to parameters, only replica 0 to buffers, and each to
        the state that it carries."""
        return shard not in self.buffer_shards or replica == self.carried.get(shard, 0)

    # ---- what the main thread does ----

    def take(self, action: Action | None) -> bool:
        """Start `action` on the main thread. Return False, and change nothing, if it is no longer the next action.

        From `take(Install(...))` until the event `Installed`, no slot is written.
        """
        if action is None or action != self.next_action():
            return False
        match action:
            case UploadFirst():
                self._initialise = False
            case Install(version=version):
                self._installing = version
            case Compute(replica=replica):
                self._begin_replica(replica)
        return True

    def _begin_replica(self, replica: int) -> None:
        self._computing, self.rewound = replica, False

    def fill(self, shard: int) -> None:
        """Mark the slot as being written by the main thread. Call it only after `may_fill(shard)` returned True."""
        self._slots[shard] = Slot.FILLING

    @property
    def _may_initialise(self) -> bool:
        return self.view is not None and all(server.id in self._links for server in self.view.servers)

    # ---- views ----

    def _take_view(self, view: View) -> tuple[View | None, set[str]]:
        """Put `view` in force; return the view before it, and the ids of servers that are still the same process."""
        before, self.view = self.view, view
        self.steps = view.orders.last(self._rounds)
        incarnations = {member.id: member.incarnation for member in before.servers} if before is not None else {}
        stayed = {member.id for member in view.servers if incarnations.get(member.id) == member.incarnation}
        self._links &= stayed
        return before, stayed

    def _start_generation(self, view: View) -> None:
        """A new generation starts from `view.origin`: drop what this worker holds and what it is computing."""
        self._links.clear()  # the shell has ended all links: what they were receiving is stale
        self.step = -1
        self.rewound = self._computing is not None
        self._slots.free_all(Slot.FILLING, Slot.OLD)  # the main thread may still be writing these; freed when it stops
        self._initialise = view.origin == "" and view.uploader == self.me
        self.following = False  # the worker has to ask the servers for versions again

    def _uploads_first_weights(self) -> bool:
        uploads = self.view is not None and not self.view.origin and self.view.uploader == self.me
        return uploads and self.step < 0 and self._installing < 0  # what is being installed has all been uploaded

    def _moved(self, before: View, view: View, stayed: set[str]) -> list[int]:
        """The shards whose primary is a different process in `view` than in `before`, or was in a view between them."""
        moved = set(view.moved(before))
        return [shard for shard, home in view.primary.items() if shard in moved or home not in stayed]

    def _at(self, servers: Iterable[str]) -> list[int]:
        """The shards whose primary is one of `servers`."""
        wanted = set(servers)
        return [shard for shard in range(self.shards) if self._home(shard) in wanted]

    @property
    def _number(self) -> ViewNumber:
        return self.view.number if self.view is not None else ViewNumber()

    def _home(self, shard: int) -> str:
        return self.view.primary[shard] if self.view is not None else ""

    def validate(self) -> None:
        """Raise AssertionError with a sentence if an invariant does not hold. O(number of shards)."""
        self._slots.validate()
        assert self._computing is not None or not self.rewound, "rewound, but no replica is being computed"
        installs = self._installing >= 0 and self._installing != self.reads
        assert self._computing is None or not installs, "it computes while it installs"
        assert not self._initialise or self._uploads_first_weights(), "it is to upload what another worker has"
        for shard, slot in enumerate(self._slots):
            assert slot is not Slot.FILLING or self.computing, f"slot {shard} is written, but no replica is computed"
            linked = self._home(shard) in self._links
            assert slot is not Slot.QUEUED or linked, f"slot {shard} is queued for {self._home(shard)}, without a link"
