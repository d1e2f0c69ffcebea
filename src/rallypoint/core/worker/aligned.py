"""The worker's machine in an aligned job: what to compute, what to send, which versions to take, when to install them.

When a version comes while its slot is being
written (somebody else has computed our replica too), it is let go and fetched later (I5).

Nothing here is ever repaired; it is done again (I2). A link that broke, a server that was replaced, a replica that
changed hands: each only changes what this worker knows to have reached the shard's primary, and whatever has not is
computed and sent once more. The model itself holds the version of the step in progress until every shard of the next
one has come, so there is nothing to rewind for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.view import View
from rallypoint.core.worker.scan import Lowest, Unanimity
from rallypoint.core.worker.slots import (
    Action,
    Arriving,
    Assisted,
    Compute,
    Discard,
    Effect,
    Event,
    Fetch,
    Filled,
    Follow,
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
    SlotMachine,
    ToWait,
    Viewed,
)


@dataclass(slots=True)
class WorkerMachine(SlotMachine):
    """One worker's part in an aligned job, in which `step` is the version that the model holds.

    Versions are the job's here, also where shards take turns: there, a shard's own version goes by the tick at which it
    takes contributions next, the last of those it is right for. Only what is sent has the shard's own number.
    """

    cadence: Cadence = TOGETHER
    in_order: bool = False  # the model goes from each version to the next, and may leave none out (AllReduce)
    _held: list[int] = field(init=False)  # the version in a slot that is landing or landed
    _newest: Lowest = field(init=False)  # the newest version known to exist, -1 when nothing is known
    _whole: Lowest = field(init=False)  # the newest of which that can be begun with, likewise
    _asked: list[int] = field(init=False)  # the version that was fetched and has not come
    _here: Unanimity = field(init=False)
    _delivered: list[set[int]] = field(init=False)  # replicas of this step sent to the shard's primary
    _wanted: frozenset[int] = frozenset()  # the shards that the replica in progress is computed for
    _assists: set[int] = field(default_factory=set)
    _installing: int = -1  # the version that the main thread is copying out of the slots
    _finishing: bool = False  # it still does, although that version is void: the model is to be whole all the same

    def __post_init__(self) -> None:
        SlotMachine.__post_init__(self)
        self._held = [-1] * self.shards
        self._newest = Lowest(self.shards, -1)
        self._whole = Lowest(self.shards, -1)
        self._here = Unanimity(self.shards)
        self._asked = [-1] * self.shards
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
        known = self._newest.lowest
        if self.in_order and known >= 0:
            return self.step + 1 if self.step >= 0 else self._whole.lowest
        return -1 if known < 0 else max(self.step + 1, known)

    def next_action(self) -> Action | None:
        """What the main thread is to do now; None when it has to wait."""
        if self._initialise:
            return Initialise() if self._may_initialise else None
        if self.complete:
            return Install(self.target)
        if not 0 <= self.step < self.steps or self._newest.lowest < 0:
            return None  # (or nothing has been heard for a while: this step may be long over)
        for replica in self.assigned:
            if any(self._needs(shard, replica) for shard in range(self.shards)):
                return Compute(self.step, replica)
        return None

    @property
    def complete(self) -> bool:
        """Is all here that is to be installed next, and the main thread free to do it?"""
        target = self.target
        if target < 0 or self._computing is not None:
            return False
        return self._here.holds(lambda shard: self._in_place(shard, target))

    @property
    def takes_part(self) -> bool:
        """Is there anything dealt to this worker, now or later?"""
        return self.view is not None and self.view.takes_part(self.me, self.step)

    @property
    def upcoming(self) -> tuple[int, int] | None:
        """The step and replica that will be computed first once the next version is installed."""
        if not self.following or self.view is None or not 0 <= self.step < self.steps - 1:
            return None
        replicas = self.view.replicas_of(self.me, self.step + 1)
        return (self.step + 1, replicas[0]) if replicas else None

    @property
    def assigned(self) -> Sequence[int]:
        """The replicas to compute at the step in progress, ascending."""
        own = self.view.replicas_of(self.me, self.step) if self.view is not None else ()
        return sorted({*own, *self._assists})

    @property
    def keeps(self) -> frozenset[int]:
        """The replicas that this worker may contribute for as things are."""
        return frozenset(self.assigned)

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
        return [shard for shard in range(self.shards) if not self._in_place(shard, target)]

    @property
    def changed(self) -> list[int]:
        """The shards that the install in progress is of: those that the model does not hold already."""
        return [shard for shard in range(self.shards) if self._changes(shard, self._installing)]

    def contributes(self, shard: int, replica: int) -> bool:
        """Does this replica contribute to that shard at the step in progress?"""
        return SlotMachine.contributes(self, shard, replica) and self.cadence.due(shard, self.step)

    # ---- what the main thread does ----

    def _begin_install(self, version: int) -> None:
        self._installing = version

    def _begin_replica(self, replica: int) -> None:
        self._wanted = frozenset(self._needed_by(replica))

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; the effects are to be run in order."""
        match event:
            case Filled(shard=shard):
                return self._filled(shard)
            case Sent(shard=shard, serial=serial):
                self._sent(shard, serial)
                return []
            case ReplicaComputed() | ReplicaAbandoned():
                return self._end_replica()
            case Arriving():
                return self._arriving(event)
            case Landed(shard=shard):
                if self._slots[shard] is Slot.LANDING:
                    self._slots[shard] = Slot.LANDED
                return self._seek() if self._held[shard] != self._right(shard, self.target) else []
            case Installed():
                if self._installing < 0:  # rewound meanwhile
                    finishing, self._finishing = self._finishing, False
                    return self._seek() if finishing else []
                version, self._installing = self._installing, -1
                return self._begin_step(version)
            case ToWait():
                return []  # nobody is ahead here
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
                self._forget(self._at([server]))
                return []
            case Viewed(view=view):
                return self._viewed(view)

    def _filled(self, shard: int) -> list[Effect]:
        home = self._home(shard)
        if self._computing is None or self.rewound or home not in self._links or self._newest[shard] > self.step:
            self._slots[shard] = Slot.FREE
            return self._seek()
        self._delivered[shard].add(self._computing)
        own = self.cadence.updates_before(shard, self.step)
        return [Send(shard, own, self._computing, home, self._queue(shard), self._number)]

    def _end_replica(self) -> list[Effect]:
        self._computing, self._wanted, self.rewound = None, frozenset(), False
        self._let_go()
        return self._seek()

    def _arriving(self, event: Arriving) -> list[Effect]:
        shard, version = event.shard, self.cadence.round_of(event.shard, event.version)
        if self.view is None or event.view < self.view.generation:
            return [Discard(shard)]
        if event.begins and self.step >= 0:
            # Of a beginning that we have not heard of yet; when we have, the links are made anew and it comes again.
            return [Discard(shard)]
        before = self.target
        self._newest.raise_to(shard, version)
        self._whole.raise_to(shard, version if event.whole else -1)
        target = self.target
        if self._asked[shard] == version:
            self._asked[shard] = -1
        # A slot still QUEUED is no obstacle: that the version exists means the server needs nothing more from this
        # step, so whatever else leaves from these bytes will be dropped as a repeat (I2).
        right = self._right(shard, target)
        usable = not self._finishing and (event.whole or self.step >= 0)
        has_room = self._slots[shard] in (Slot.FREE, Slot.QUEUED) or (
            self._slots[shard] is Slot.LANDED and self._held[shard] != right
        )
        # Before anything is known of the other shards (the first version, a late joiner), take what comes.
        if usable and has_room and version > self._right(shard, self.step) and right in (-1, version):
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
        before, stayed = self._take_view(view)
        if before is None or before.generation != view.generation:
            self._rewind(view)
        else:
            self._forget(self._moved(before, view, stayed))
        return [*self._follow_or_not(view), *self._seek()]

    def _rewind(self, view: View) -> None:
        """All members go back to `view.origin`."""
        self._start_generation(view)
        self._finishing = self._finishing or (self.in_order and self._installing >= 0)
        self._installing = -1
        self._wanted = frozenset()
        self._held = [-1] * self.shards
        self._newest = Lowest(self.shards, -1)
        self._whole = Lowest(self.shards, -1)
        self._asked = [-1] * self.shards
        self._delivered = [set() for _ in range(self.shards)]
        self._assists.clear()

    def _first_weights_lost(self, server: str) -> bool:
        return self._uploads_first_weights() and any(self._newest[s] < 0 for s in self._at([server]))

    def _follow_or_not(self, view: View) -> list[Effect]:
        following = view.ending or view.takes_part(self.me, self.step)
        if following == self.following:
            return []
        self.following = following
        if following:
            self._newest = Lowest(self.shards, -1)  # nothing was heard for a while
            self._whole = Lowest(self.shards, -1)
        return [Follow(server, following) for server in sorted(self._links)]

    def _forget(self, shards: Iterable[int]) -> None:
        """Nothing is known to have reached these shards' primary; what was under way to or from it is lost."""
        for shard in shards:
            self._delivered[shard].clear()
            self._asked[shard] = -1
            if self._slots[shard] in (Slot.QUEUED, Slot.LANDING):
                self._slots[shard] = Slot.FREE

    def _right(self, shard: int, step: int) -> int:
        """The version of this shard that is right for a step, by the name that it has here."""
        return self.cadence.next_due(shard, step)

    def _changes(self, shard: int, target: int) -> bool:
        """Does the target have another version of this shard than the model?"""
        return self.step < 0 or self.cadence.changes(shard, self.step, target)

    def _in_place(self, shard: int, target: int) -> bool:
        """Is what the target needs of this shard here, in the model or in its slot?"""
        if not self._changes(shard, target):
            return True
        return self._slots[shard] is Slot.LANDED and self._held[shard] == self._right(shard, target)

    def _needed_by(self, replica: int) -> list[int]:
        """The shards that have not had this replica's contribution to the step in progress from us, and still may."""
        return [shard for shard in range(self.shards) if self._needs(shard, replica)]

    def _needs(self, shard: int, replica: int) -> bool:
        return (
            self._newest[shard] <= self.step and replica not in self._delivered[shard]
            and self.contributes(shard, replica) and self._home(shard) in self._links
        )  # fmt: skip

    def _seek(self) -> list[Effect]:
        """Fetch what exists of the target, is not here, and is not coming by itself."""
        target = self.target
        if target < 0 or not self.following or self._finishing:
            return []
        effects: list[Effect] = []
        for shard, slot in enumerate(self._slots):
            right = self._right(shard, target)
            has_room = slot in (Slot.FREE, Slot.QUEUED) or (slot is Slot.LANDED and self._held[shard] != right)
            known = self._newest[shard] >= right and self._asked[shard] != right and self._changes(shard, target)
            if has_room and known and self._home(shard) in self._links:
                self._asked[shard] = right
                effects.append(Fetch(shard, self.cadence.updates_before(shard, target), self._home(shard)))
        return effects
