"""The base class of a worker's two machines (`aligned`, `streaming`): slots, links that are up, the view in force."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.sums import Presum
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.slots import Action, Compute, Install, Slot, Slots, UploadFirst


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
        """The state of each shard's slot."""
        return self._slots

    @property
    def computing(self) -> bool:
        """True while the main thread computes a replica."""
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

    # ---- invariants ----

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
