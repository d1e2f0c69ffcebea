"""What a worker's two machines share: the slots, the links that stand, the view in force."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.slots import Action, Compute, Initialise, Install, Slot, Slots


@dataclass(slots=True)
class SlotMachine(ABC):
    """One worker's part in a job.

    `shards` is the number of shards; `buffer_shards` those to which only replica 0 contributes; `steps` the last one.
    `step` is the one that the model is for, -1 before the first. With `in_order` the model goes from each version to
    the next and may leave none out, because the worker steps the optimizer (AllReduce).
    """

    me: str
    shards: int
    buffer_shards: frozenset[int]
    steps: int
    step: int = -1
    view: View | None = None
    rewound: bool = False  # the replica in progress belongs to an older generation
    following: bool = False
    in_order: bool = False
    _slots: Slots = field(init=False)
    _computing: int | None = None
    _installing: int = -1  # the version that the main thread is copying out of the slots
    _initialise: bool = False
    _links: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._slots = Slots(self.shards)

    # ---- questions the shell asks ----

    @abstractmethod
    def next_action(self) -> Action | None:
        """What the main thread is to do now; None when it has to wait."""

    @property
    @abstractmethod
    def assigned(self) -> Sequence[int]:
        """The replicas to compute, ascending."""

    @property
    def slots(self) -> Slots:
        """What each slot holds."""
        return self._slots

    @property
    def computing(self) -> bool:
        """Is a replica being computed?"""
        return self._computing is not None

    @property
    def takes_part(self) -> bool:
        """Does this worker compute anything, now or later?"""
        return bool(self.assigned)

    @property
    def keeps(self) -> frozenset[int]:
        """The replicas that this worker may contribute for as things are."""
        return frozenset(self.assigned)

    @property
    def missing(self) -> list[int]:
        """Shards of which nothing has landed."""
        return [shard for shard, slot in enumerate(self._slots) if slot is not Slot.LANDED]

    @property
    def changed(self) -> list[int]:
        """The shards that the install in progress is of."""
        return list(range(self.shards))

    @property
    def row_version(self) -> int | None:
        """The version of which a replica in progress reads rows of tables; None: the newest."""
        return None

    @property
    def must_upload(self) -> bool:
        """Has only this worker what all start from, and have the servers not got it yet?"""
        return self.in_order and self._uploads_first_weights()

    def contributes(self, shard: int, replica: int) -> bool:
        """Does this replica contribute to that shard?"""
        return shard not in self.buffer_shards or replica == 0

    # ---- what the main thread does ----

    def take(self, action: Action | None) -> bool:
        """The main thread begins with `action`. False if meanwhile there is something else to do, or nothing.

        From `take(Install(...))` until the event Installed no slot is written.
        """
        if action is None or action != self.next_action():
            return False
        match action:
            case Initialise():
                self._initialise = False
            case Install(version=version):
                self._installing = version
            case Compute(replica=replica):
                self._begin_replica(replica)
        return True

    def _begin_replica(self, replica: int) -> None:
        self._computing, self.rewound = replica, False

    def fill(self, shard: int) -> None:
        """The main thread begins to write the slot (`may_fill` has said that it may)."""
        self._slots[shard] = Slot.FILLING

    @property
    def _may_initialise(self) -> bool:
        return self.view is not None and all(server.id in self._links for server in self.view.servers)

    # ---- views ----

    def _take_view(self, view: View) -> tuple[View | None, set[str]]:
        """The view is in force: the one before, and the servers that are still the same processes."""
        before, self.view = self.view, view
        incarnations = {member.id: member.incarnation for member in before.servers} if before is not None else {}
        stayed = {member.id for member in view.servers if incarnations.get(member.id) == member.incarnation}
        self._links &= stayed
        return before, stayed

    def _start_generation(self, view: View) -> None:
        """All members go back to `view.origin`: drop what this worker holds and what it is computing."""
        self._links.clear()  # all of them have ended: what they were receiving is stale
        self.step = -1
        self.rewound = self._computing is not None
        self._slots.free_all(but=Slot.FILLING)  # a slot that the main thread is writing stays its own until it stops
        self._initialise = view.origin == "" and view.uploader == self.me
        self.following = False  # everything has to be asked for again

    def _uploads_first_weights(self) -> bool:
        return self.view is not None and not self.view.origin and self.view.uploader == self.me and self.step < 0

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

    # ---- invariants ----

    def validate(self) -> None:
        """AssertionError, with a sentence, if an invariant does not hold. Looks at each shard once."""
        self._slots.validate()
        assert self._computing is not None or not self.rewound, "rewound, but no replica is being computed"
        assert self._computing is None or self._installing < 0, "it computes while it installs"
        assert not self._initialise or self._uploads_first_weights(), "it is to upload what another worker has"
        for shard, slot in enumerate(self._slots):
            assert slot is not Slot.FILLING or self.computing, f"slot {shard} is written, but no replica is computed"
            linked = self._home(shard) in self._links
            assert slot is not Slot.QUEUED or linked, f"slot {shard} is queued for {self._home(shard)}, without a link"
