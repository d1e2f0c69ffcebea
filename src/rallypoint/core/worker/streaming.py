"""The worker's machine in a streaming job (BoundedStaleness, Async): each replica has a clock of its own.

The worker repeats, one replica after the other:

    1. It computes one step of the replica from the parameters that the model holds.
    2. It pushes the contribution shard by shard. Each push names the replica that comes next.
    3. Each shard answers with its parameters for that replica, and with the replica's clock at that shard.
    4. When all answers are here, the worker installs them.

Recovery is to do the work again, as in `core/worker/aligned.py` (I2): the worker repeats each contribution and each
request that the server may not have received. A replica that comes from another worker starts at the lowest clock that
any shard has for it; shards that are ahead drop the repeated contributions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.shard.events import EVERYTHING
from rallypoint.core.view import View
from rallypoint.core.worker import slots
from rallypoint.core.worker.slots import Action, Effect, Event, Slot, SlotMachine, Unanimity


@dataclass(slots=True)
class StreamMachine(SlotMachine):
    """The machine of one worker in a streaming job; `step` is the step of the replica in progress."""

    _clocks: dict[int, int] = field(default_factory=dict)  # the next step of each replica, as far as known here
    _current: int | None = None  # the replica that is being computed, or will be once its parameters are installed
    _next: int | None = None  # the replica (or EVERYTHING) whose parameters this worker asks for
    _ready: bool = False  # the model holds the parameters from which to compute `_current`
    _asked: list[bool] = field(init=False)  # by shard: the server was asked for the parameters of `_next`
    _answers: list[int] = field(init=False)  # the clock that came with what is landing or has landed; -1 if nothing
    _bases: list[int] = field(init=False)  # the version in the model
    _delivered: list[bool] = field(init=False)  # this step's contribution has been sent to the shard's primary
    _here: Unanimity = field(init=False)

    def __post_init__(self) -> None:
        SlotMachine.__post_init__(self)
        self._here = Unanimity(self.shards)
        self._bases = [0] * self.shards
        self._forget_all()

    def _forget_all(self) -> None:
        """Start anew: no shard was asked, has answered, or was sent a contribution."""
        self._answers, self.landed = [-1] * self.shards, [-1] * self.shards
        self._asked, self._delivered = [False] * self.shards, [False] * self.shards

    # ---- questions the shell asks ----

    @property
    def target(self) -> int:
        """The step after the one in progress while the worker asks for parameters; -1 while it asks for none."""
        return -1 if self._next is None else self.step + 1

    @property
    def assigned(self) -> Sequence[int]:
        """The replicas of this worker, ascending. The newest assignment counts at once, whatever its start."""
        assignments = self.view.assignments if self.view is not None else ()
        return sorted(assignments[-1].replicas.get(self.me, ())) if assignments else []

    @property
    def keeps(self) -> frozenset[int]:
        """The replicas whose codec states this worker keeps: those assigned, and the one that it has begun."""
        current = self._current if self._ready else self._next if self._installing >= 0 else None
        return frozenset(self.assigned if current is None else (*self.assigned, current))

    @property
    def upcoming(self) -> tuple[int, int] | None:
        """The (step, replica) that this worker computes next; None if unknown or none."""
        known = self._next is not None and self._next != EVERYTHING and self._next in self._clocks
        return (self._clocks[self._next], self._next) if known and self._next is not None else None

    def next_action(self) -> Action | None:
        if self._initialise:
            return slots.UploadFirst() if self._may_initialise else None
        if self._computing is not None or self._installing >= 0:
            return None
        left = self._ready and any(self._is_left(s) and self._home(s) in self._links for s in range(self.shards))
        if left and self._current is not None:
            return slots.Compute(self.step, self._current)
        return slots.Install(self._landed_clock) if self.complete else None

    @property
    def complete(self) -> bool:
        """True when every shard has answered and the main thread can install the answers."""
        if self._computing is not None or self._installing >= 0 or self._next is None:
            return False
        return self._all_landed

    @property
    def _all_landed(self) -> bool:
        return self._here.holds(lambda shard: self._slots[shard] is Slot.LANDED)

    def may_fill(self, shard: int) -> bool | None:
        """True if the gradient may be written into the slot now; False: wait; None: nobody needs this gradient."""
        if self._slots[shard] is Slot.FILLING:
            return True
        wanted = self._is_left(shard) and self._home(shard) in self._links
        if not wanted or self._slots[shard] in (Slot.LANDING, Slot.LANDED):
            return None
        return self._slots[shard] is Slot.FREE

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        match event:
            case slots.Filled(shard=shard):
                return self._filled(shard)
            case slots.SlotSent(shard=shard, serial=serial):
                self._slots.sent(shard, serial)
                return []
            case slots.Arriving():
                return self._arriving(event)
            case slots.Landed(shard=shard):
                if self._slots[shard] is Slot.LANDING:
                    self._slots[shard] = Slot.LANDED
                return self._check_clock()
            case slots.ReplicaComputed() | slots.ReplicaAbandoned():
                return self._end_replica()
            case slots.Installed():
                return self._installed()
            case slots.LinkUp(server=server):
                self._links.add(server)
                return self._ask()
            case slots.LinkLost(server=server):
                self._links.discard(server)
                if self._uploads_first_weights() and any(self._answers[s] < 0 for s in self._at([server])):
                    self._initialise = True  # the uploaded weights may be lost: upload again
                self._forget(self._at([server]))
                return self._choose_again()  # a contribution may be lost, also after this worker's last step
            case slots.Viewed(view=view):
                return self._viewed(view)
            case slots.ToWait(replica=replica, clock=clock):
                # Never `steps`: only the answers of all shards tell that the replica is finished everywhere.
                self._clocks[replica] = max(self._clocks.get(replica, 0), min(clock, self.steps - 1))
                return self._choose_again()
            case slots.Assisted():
                return []  # there are no backup tasks in streaming jobs

    def _filled(self, shard: int) -> list[Effect]:
        home = self._home(shard)
        if self._computing is None or self.rewound or home not in self._links:
            self._slots[shard] = Slot.FREE
            return []
        self._delivered[shard] = True
        wants = self._following()
        self._asked[shard] = wants is not None
        serial, base = self._slots.queue(shard), self._bases[shard]
        return [slots.Send(shard, self.step, self._computing, home, serial, self._number, base=base, wants=wants)]

    def _following(self) -> int | None:
        """The replica that comes after the one in progress; chosen once per step, named in each push."""
        if self._next is None and self._current is not None:
            clocks = {**self._clocks, self._current: self.step + 1}
            self._next = _choose(self, clocks)
        return self._next

    def _end_replica(self) -> list[Effect]:
        computing, self._computing, self.rewound = self._computing, None, False
        self._slots.free(Slot.FILLING)
        if computing is None or computing != self._current or any(map(self._is_left, range(self.shards))):
            return []  # rewound; or some shards are not delivered: compute again when their links are up
        self._following()
        # The answers may have come already, and say that another worker is further: the clock does not go back.
        self._clocks[computing] = max(self._clocks.get(computing, 0), self.step + 1)
        self._current, self._ready = None, False
        return [*self._choose_again(), *self._ask()]

    def _arriving(self, event: slots.Arriving) -> list[Effect]:
        shard = event.shard
        if self.view is None or event.view < self.view.generation:
            return [slots.DropArriving(shard)]
        if event.replica != self._next or not self._asked[shard] or self._slots[shard] in (Slot.LANDING, Slot.LANDED):
            return [slots.DropArriving(shard)]  # not wanted (any more), or here already
        if self._installing >= 0 or self._slots[shard] is not Slot.FREE:
            self._asked[shard] = False  # the slot is in use (its `SlotSent` may come after this answer): ask again
            return [slots.DropArriving(shard), *self._ask()]
        self._slots[shard] = Slot.LANDING
        self._answers[shard], self.landed[shard] = event.clock, event.version
        return [slots.Land(shard)]

    def _check_clock(self) -> list[Effect]:
        """When all answers are here, learn the replica's clock; choose another replica if this one has finished."""
        if self._next is None or self._next == EVERYTHING or not self._all_landed:
            return []
        self._clocks[self._next] = self._landed_clock
        return self._choose_again() if self._landed_clock >= self.steps else []

    def _installed(self) -> list[Effect]:
        if self._installing < 0:
            return []  # a new generation began during the install
        self._installing = -1
        self.step, self._current, self._next = self._landed_clock, self._next, None
        self._bases = list(self.landed)
        self._slots.free_all()
        self._forget_all()
        self._ready = self._current != EVERYTHING
        if self._current == EVERYTHING:
            self._current = None
        return []

    def _viewed(self, view: View) -> list[Effect]:
        if self.view is not None and view.number <= self.view.number:
            return []
        before, stayed = self._take_view(view)
        if before is None or before.generation != view.generation:
            self._rewind(view)
        else:
            self._forget(self._moved(before, view, stayed))
        self.following = view.orders.ending or self.takes_part
        return [*self._choose_again(), *self._ask()]

    def _rewind(self, view: View) -> None:
        """A new generation starts from `view.origin`: drop everything of the old one."""
        self._start_generation(view)
        self._clocks.clear()
        self._current = self._next = None
        self._ready, self._installing = False, -1
        self._forget_all()

    def _forget(self, shards: Iterable[int]) -> None:
        """The link to these shards' primary is lost: count contributions as not delivered, requests as not made."""
        for shard in shards:
            self._clocks.clear()  # contributions of any replica may be lost with the primary: the answers will tell
            self._delivered[shard] = self._asked[shard] = False
            # While a step is in progress, a landed answer is for the next replica, and may miss this step's
            # contribution: ask again after it was sent again.
            if self._slots[shard] in (Slot.QUEUED, Slot.LANDING) or (self._ready and self._slots[shard] is Slot.LANDED):
                self._slots[shard] = Slot.FREE
                self._answers[shard] = -1

    # ---- which replica comes next ----

    def _is_left(self, shard: int) -> bool:
        """True if the shard still needs the contribution of the step in progress."""
        current = self._current if self._ready else None
        return current is not None and not self._delivered[shard] and self.contributes(shard, current)

    @property
    def _landed_clock(self) -> int:
        """The next replica's step: the lowest clock among the shards' answers."""
        if self._next == EVERYTHING or self._next is None:
            return self.steps
        return min(
            (self._answers[s] for s in range(self.shards) if self.contributes(s, self._next)), default=self.steps
        )

    def _choose_again(self) -> list[Effect]:
        """Between steps, choose the next replica again; if it is another one, ask all shards for its parameters."""
        if self._ready or self._installing >= 0:
            return []  # the step in progress comes first, even if its replica was reassigned meanwhile
        wanted = _choose(self, self._clocks)
        if wanted == self._next:
            return []
        self._next = wanted
        self._asked = [False] * self.shards
        self._slots.free(Slot.LANDED, Slot.LANDING)
        return self._ask()

    def _ask(self) -> list[Effect]:
        """Ask each shard that was not asked yet for the next replica's parameters."""
        if self._next is None or self._ready or self._installing >= 0:
            return []
        effects: list[Effect] = []
        for shard, slot in enumerate(self._slots):
            if slot not in (Slot.LANDING, Slot.LANDED) and not self._asked[shard] and self._home(shard) in self._links:
                self._asked[shard] = True
                effects.append(slots.AskNext(shard, self._next, self._home(shard)))
        return effects

    def validate(self) -> None:
        SlotMachine.validate(self)
        assert not self._ready or self._current is not None, "the model is ready for no replica"
        assert not (self._ready and self._installing >= 0), "it installs before the step in progress is over"
        over = self._next is None or self._next == EVERYTHING
        assert over or self._installing < self.steps, f"replica {self._next} has finished, and is installed"
        computing = self._computing
        assert computing is None or computing == self._current or self.rewound, f"it computes {computing} unasked"
        assert self._current is None or 0 <= self.step < self.steps, f"step {self.step} of {self.steps}"
        assert all(0 <= clock <= self.steps for clock in self._clocks.values()), f"clocks {self._clocks}"
        for shard, slot in enumerate(self._slots):
            if slot in (Slot.LANDING, Slot.LANDED):
                assert self._next is not None, f"slot {shard} is {slot}, but nothing is wanted"
                assert self._answers[shard] >= 0, f"slot {shard} is {slot}, but of no clock"


def _choose(machine: StreamMachine, clocks: Mapping[int, int]) -> int | None:
    """The assigned replica with the lowest clock; EVERYTHING (the final parameters) when all have finished; else None.
    """
    if machine.step >= machine.steps:
        return None
    left = [replica for replica in machine.assigned if clocks.get(replica, 0) < machine.steps]
    if left:
        return min(left, key=lambda replica: (clocks.get(replica, 0), replica))
    finished = bool(machine.assigned) or (machine.view is not None and machine.view.orders.ending)
    return EVERYTHING if finished else None
