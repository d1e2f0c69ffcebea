"""The worker's machine in a streaming job: each replica goes at its own pace, and asks for what it needs next.

The worker computes one step of one replica after the other. For each it uses the parameters that it holds, pushes the
contribution shard by shard, and says with each push which replica comes next. Every shard answers with its parameters
for that replica, and with the clock that it has of it. When all answers have come they are installed, and the next
replica's step begins.

As in `core/worker/aligned.py` nothing is repaired: what may not have arrived is computed and sent again (I2), and what
was wanted is wanted again if the server may not have heard it. A replica that comes from another worker begins at the
lowest clock that any shard has of it; shards that are ahead drop the repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.core.shard.events import EVERYTHING
from rallypoint.core.view import View
from rallypoint.core.worker.machine import SlotMachine
from rallypoint.core.worker.scan import Unanimity
from rallypoint.core.worker.slots import (
    Action,
    Arriving,
    Assisted,
    Compute,
    Discard,
    Effect,
    Event,
    Filled,
    Initialise,
    Install,
    Installed,
    Land,
    Landed,
    LinkLost,
    LinkUp,
    ReplicaAbandoned,
    ReplicaComputed,
    Send,
    Sent,
    Slot,
    ToWait,
    Viewed,
    Want,
)


@dataclass(slots=True)
class StreamMachine(SlotMachine):
    """One worker's part in a streaming job, in which `step` is that of the replica that is computed."""

    _clocks: dict[int, int] = field(default_factory=dict)  # the next step of each replica, as far as known here
    _current: int | None = None  # the replica that is being computed, or will be once its parameters are installed
    _next: int | None = None  # whose parameters are wanted now
    _ready: bool = False  # the model holds what `_current` is to be computed from
    _asked: list[bool] = field(init=False)  # the shard's server has heard what is wanted, as far as we know
    _answers: list[int] = field(init=False)  # the clock that came with what is landing or has landed; -1 if nothing
    _versions: list[int] = field(init=False)  # what is landing or has landed
    _bases: list[int] = field(init=False)  # what the model holds
    _delivered: list[bool] = field(init=False)  # this step's contribution has been sent to the shard's primary
    _here: Unanimity = field(init=False)

    def __post_init__(self) -> None:
        SlotMachine.__post_init__(self)
        self._here = Unanimity(self.shards)
        self._bases = [0] * self.shards
        self._forget_all()

    def _forget_all(self) -> None:
        """Nothing has been asked for, answered or delivered."""
        self._answers, self._versions = [-1] * self.shards, [-1] * self.shards
        self._asked, self._delivered = [False] * self.shards, [False] * self.shards

    # ---- questions the shell asks ----

    @property
    def target(self) -> int:
        """What will be installed next: the step of the replica that is wanted; -1 if nothing is."""
        return -1 if self._next is None else self.step + 1

    @property
    def assigned(self) -> Sequence[int]:
        """The replicas assigned to this worker, ascending: the newest assignment counts at once."""
        assignments = self.view.assignments if self.view is not None else ()
        return sorted(assignments[-1].replicas.get(self.me, ())) if assignments else []

    @property
    def keeps(self) -> frozenset[int]:
        """The replicas that this worker may contribute for: those assigned, and the one that it has begun."""
        current = self._current if self._ready else self._next if self._installing >= 0 else None
        return frozenset(self.assigned if current is None else (*self.assigned, current))

    @property
    def upcoming(self) -> tuple[int, int] | None:
        """The step and replica that come next."""
        known = self._next is not None and self._next != EVERYTHING and self._next in self._clocks
        return (self._clocks[self._next], self._next) if known and self._next is not None else None

    def next_action(self) -> Action | None:
        """What the main thread is to do now; None when it has to wait."""
        if self._initialise:
            return Initialise() if self._may_initialise else None
        if self._computing is not None or self._installing >= 0:
            return None
        left = self._ready and any(self._is_left(s) and self._home(s) in self._links for s in range(self.shards))
        if left and self._current is not None:
            return Compute(self.step, self._current)
        return Install(self._landed_clock) if self.complete else None

    @property
    def complete(self) -> bool:
        """Is all here that is to be installed next, and the main thread free to do it?"""
        if self._computing is not None or self._installing >= 0 or self._next is None:
            return False
        return self._all_landed

    @property
    def _all_landed(self) -> bool:
        return self._here.holds(lambda shard: self._slots[shard] is Slot.LANDED)

    def may_fill(self, shard: int) -> bool | None:
        """May the gradient be written into the slot now? None: it need not be written at all."""
        if self._slots[shard] is Slot.FILLING:
            return True
        wanted = self._is_left(shard) and self._home(shard) in self._links
        if not wanted or self._slots[shard] in (Slot.LANDING, Slot.LANDED):
            return None
        return self._slots[shard] is Slot.FREE

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; the effects are to be run in order."""
        match event:
            case Filled(shard=shard):
                return self._filled(shard)
            case Sent(shard=shard, serial=serial):
                self._slots.sent(shard, serial)
                return []
            case Arriving():
                return self._arriving(event)
            case Landed(shard=shard):
                if self._slots[shard] is Slot.LANDING:
                    self._slots[shard] = Slot.LANDED
                return self._check_clock()
            case ReplicaComputed() | ReplicaAbandoned():
                return self._end_replica()
            case Installed():
                return self._installed()
            case LinkUp(server=server):
                self._links.add(server)
                return self._ask()
            case LinkLost(server=server):
                self._links.discard(server)
                if self._uploads_first_weights() and any(self._answers[s] < 0 for s in self._at([server])):
                    self._initialise = True  # they may be lost
                self._forget(self._at([server]))
                return self._choose_again()  # who waits for the end of the job may have to contribute once more
            case Viewed(view=view):
                return self._viewed(view)
            case ToWait(replica=replica, clock=clock):
                # Whether it is finished everywhere only the answers of all shards can tell.
                self._clocks[replica] = max(self._clocks.get(replica, 0), min(clock, self.steps - 1))
                return self._choose_again()
            case Assisted():
                return []  # nobody waits for a straggler here

    def _filled(self, shard: int) -> list[Effect]:
        home = self._home(shard)
        if self._computing is None or self.rewound or home not in self._links:
            self._slots[shard] = Slot.FREE
            return []
        self._delivered[shard] = True
        wants = self._following()
        self._asked[shard] = wants is not None
        serial, base = self._slots.queue(shard), self._bases[shard]
        return [Send(shard, self.step, self._computing, home, serial, self._number, base=base, wants=wants)]

    def _following(self) -> int | None:
        """The replica whose parameters the answers to this step's contributions are to hold (decided once a step)."""
        if self._next is None and self._current is not None:
            clocks = {**self._clocks, self._current: self.step + 1}
            self._next = _choose(self, clocks)
        return self._next

    def _end_replica(self) -> list[Effect]:
        computing, self._computing, self.rewound = self._computing, None, False
        self._slots.free(Slot.FILLING)
        if computing is None or computing != self._current or any(map(self._is_left, range(self.shards))):
            return []  # rewound; or once more, as soon as there is a link
        self._following()
        self._clocks[computing] = self.step + 1
        self._current, self._ready = None, False
        return [*self._choose_again(), *self._ask()]

    def _arriving(self, event: Arriving) -> list[Effect]:
        shard = event.shard
        if self.view is None or event.view < self.view.generation:
            return [Discard(shard)]
        if event.replica != self._next or not self._asked[shard] or self._slots[shard] in (Slot.LANDING, Slot.LANDED):
            return [Discard(shard)]  # not wanted (any more), or here already
        if self._installing >= 0 or self._slots[shard] is not Slot.FREE:
            self._asked[shard] = False  # a late answer, or one that overtook the news that the gradient has left
            return [Discard(shard), *self._ask()]
        self._slots[shard] = Slot.LANDING
        self._answers[shard], self._versions[shard] = event.clock, event.version
        return [Land(shard)]

    def _check_clock(self) -> list[Effect]:
        """All answers are here: is there anything left for that replica to do?"""
        if self._next is None or self._next == EVERYTHING or not self._all_landed:
            return []
        self._clocks[self._next] = self._landed_clock
        return self._choose_again() if self._landed_clock >= self.steps else []

    def _installed(self) -> list[Effect]:
        if self._installing < 0:
            return []  # rewound meanwhile
        self._installing = -1
        self.step, self._current, self._next = self._landed_clock, self._next, None
        self._bases = list(self._versions)
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
        self.following = view.ending or self.takes_part
        return [*self._choose_again(), *self._ask()]

    def _rewind(self, view: View) -> None:
        """All members go back to `view.origin`."""
        self._start_generation(view)
        self._clocks.clear()
        self._current = self._next = None
        self._ready, self._installing = False, -1
        self._forget_all()

    def _forget(self, shards: Iterable[int]) -> None:
        """Nothing is known to have reached these shards' primary; what was on its way to or from it is lost."""
        for shard in shards:
            self._clocks.clear()  # what was sent of any replica may be lost with it: the answers will tell
            self._delivered[shard] = self._asked[shard] = False
            # An answer is about the replica that is wanted next. This step's contribution may have been lost after it.
            if self._slots[shard] in (Slot.QUEUED, Slot.LANDING) or (self._ready and self._slots[shard] is Slot.LANDED):
                self._slots[shard] = Slot.FREE
                self._answers[shard] = -1

    # ---- which replica comes next ----

    def _is_left(self, shard: int) -> bool:
        """Has the shard not had the contribution of the step in progress?"""
        current = self._current if self._ready else None
        return current is not None and not self._delivered[shard] and self.contributes(shard, current)

    @property
    def _landed_clock(self) -> int:
        """The step that all shards' answers allow: the lowest clock."""
        if self._next == EVERYTHING or self._next is None:
            return self.steps
        return min(
            (self._answers[s] for s in range(self.shards) if self.contributes(s, self._next)), default=self.steps
        )

    def _choose_again(self) -> list[Effect]:
        """While nothing is computed: is what is wanted still what should be?"""
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
        """Want, of every shard that has not heard of it, what is to be installed next."""
        if self._next is None or self._ready or self._installing >= 0:
            return []
        effects: list[Effect] = []
        for shard, slot in enumerate(self._slots):
            if slot not in (Slot.LANDING, Slot.LANDED) and not self._asked[shard] and self._home(shard) in self._links:
                self._asked[shard] = True
                effects.append(Want(shard, self._next, self._home(shard)))
        return effects

    # ---- invariants ----

    def validate(self) -> None:
        """AssertionError, with a sentence, if an invariant does not hold."""
        SlotMachine.validate(self)
        assert not self._ready or self._current is not None, "the model is ready for no replica"
        assert not (self._ready and self._installing >= 0), "it installs before the step in progress is over"
        computing = self._computing
        assert computing is None or computing == self._current or self.rewound, f"it computes {computing} unasked"
        assert self._current is None or 0 <= self.step < self.steps, f"step {self.step} of {self.steps}"
        assert all(0 <= clock <= self.steps for clock in self._clocks.values()), f"clocks {self._clocks}"
        for shard, slot in enumerate(self._slots):
            if slot in (Slot.LANDING, Slot.LANDED):
                assert self._next is not None, f"slot {shard} is {slot}, but nothing is wanted"
                assert self._answers[shard] >= 0, f"slot {shard} is {slot}, but of no clock"


def _choose(machine: StreamMachine, clocks: Mapping[int, int]) -> int | None:
    """The assigned replica that is furthest behind; at the end, everything; else nothing."""
    if machine.step >= machine.steps:
        return None
    left = [replica for replica in machine.assigned if clocks.get(replica, 0) < machine.steps]
    if left:
        return min(left, key=lambda replica: (clocks.get(replica, 0), replica))
    finished = bool(machine.assigned) or (machine.view is not None and machine.view.ending)
    return EVERYTHING if finished else None
