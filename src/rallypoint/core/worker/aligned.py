"""The worker's machine in an aligned job: what to compute, what to send, which versions to take, when to install them.

A version may come while its slot is being written (another worker has computed our replica too): it is discarded then
and fetched later (I5).

Nothing here is repaired; it is done again (I2). A link that broke, a server that was replaced, a replica that moved:
each only changes what this worker knows to have reached the shard's primary. Whatever has not is computed and sent once
more. The model itself holds the version of the step in progress until every shard of the next one has come, so there is
nothing to rewind for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.core.cadence import TOGETHER, Cadence
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
    ToWait,
    Viewed,
)
from rallypoint.core.worker.versions import Versions


@dataclass(slots=True)
class WorkerMachine(SlotMachine):
    """One worker's part in an aligned job, in which `step` is the version that the model holds.

    Versions are the job's here, also in staggered rounds: there a shard's own version goes by the round at which it
    takes contributions next. Only what is sent has the shard's own number.
    """

    cadence: Cadence = TOGETHER
    _versions: Versions = field(init=False)
    _here: Unanimity = field(init=False)
    _delivered: list[set[int]] = field(init=False)  # replicas of this step sent to the shard's primary
    _wanted: frozenset[int] = frozenset()  # the shards that the replica in progress is computed for
    _assists: set[int] = field(default_factory=set)
    _finishing: bool = False  # it still installs a version that became stale, so that the model is whole (`in_order`)

    def __post_init__(self) -> None:
        SlotMachine.__post_init__(self)
        self._versions = Versions(self._slots, self.cadence)
        self._here = Unanimity(self.shards)
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
        known = self._versions.newest.lowest
        if self.in_order and known >= 0:
            return self.step + 1 if self.step >= 0 else self._versions.whole.lowest
        return -1 if known < 0 else max(self.step + 1, known)

    def next_action(self) -> Action | None:
        """What the main thread is to do now; None when it has to wait."""
        if self._initialise:
            return Initialise() if self._may_initialise else None
        if self.complete:
            return Install(self.target)
        if not 0 <= self.step < self.steps or self._versions.newest.lowest < 0:
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
        """Does this worker compute anything, now or later?"""
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

    def may_fill(self, shard: int) -> bool | None:
        """May the gradient be written into the slot now? None: it need not be written at all."""
        if self._slots[shard] is Slot.FILLING:
            return True
        if shard not in self._wanted or self._versions.newest[shard] > self.step:
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

    @property
    def row_version(self) -> int | None:
        """The version of which a replica in progress reads rows of tables."""
        return max(0, self.step)

    def contributes(self, shard: int, replica: int) -> bool:
        """Does this replica contribute to that shard at the step in progress?"""
        return SlotMachine.contributes(self, shard, replica) and self.cadence.due(shard, self.step)

    def _begin_replica(self, replica: int) -> None:
        SlotMachine._begin_replica(self, replica)
        self._wanted = frozenset(shard for shard in range(self.shards) if self._needs(shard, replica))

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
                return self._seek() if self._versions.held[shard] != self._versions.right(shard, self.target) else []
            case ReplicaComputed() | ReplicaAbandoned():
                self._computing, self._wanted, self.rewound = None, frozenset(), False
                self._slots.free(Slot.FILLING)
                return self._seek()
            case Installed():
                return self._installed()
            case ToWait():
                return []  # no replica is ahead of the others here
            case Assisted(step=step, replica=replica):
                if step == self.step:
                    self._assists.add(replica)
                return []
            case LinkUp(server=server):
                self._links.add(server)
                return [Follow(server)] if self.following else []
            case LinkLost(server=server):
                self._links.discard(server)
                if self._uploads_first_weights() and any(self._versions.newest[s] < 0 for s in self._at([server])):
                    self._initialise = True  # they may be lost
                self._forget(self._at([server]))
                return []
            case Viewed(view=view):
                return self._viewed(view)

    def _filled(self, shard: int) -> list[Effect]:
        home, over = self._home(shard), self._versions.newest[shard] > self.step
        if self._computing is None or self.rewound or home not in self._links or over:
            self._slots[shard] = Slot.FREE
            return self._seek()
        self._delivered[shard].add(self._computing)
        own = self.cadence.updates_before(shard, self.step)
        return [Send(shard, own, self._computing, home, self._slots.queue(shard), self._number)]

    def _arriving(self, event: Arriving) -> list[Effect]:
        shard, version = event.shard, self.cadence.round_of(event.shard, event.version)
        if self.view is None or event.view < self.view.generation:
            return [Discard(shard)]
        if event.begins and self.step >= 0:
            # It begins a generation of which this worker has not heard. With its view the links are made anew, and it
            # comes again.
            return [Discard(shard)]
        before = self.target
        self._versions.exists(shard, version, whole=event.whole)
        target = self.target
        right = self._versions.right(shard, target)
        usable = not self._finishing and (event.whole or self.step >= 0)
        # Before anything is known of the other shards (the first version, a late joiner), take what comes.
        expected = version > self._versions.right(shard, self.step) and right in (-1, version)
        if usable and expected and self._versions.has_room(shard, right):
            self._slots[shard] = Slot.LANDING
            self._versions.held[shard] = version
            landing: list[Effect] = [Land(shard)]
            return landing if target == before else [*landing, *self._seek()]
        return [Discard(shard), *self._seek()]

    def _installed(self) -> list[Effect]:
        if self._installing < 0:  # there was a roll-back meanwhile
            finishing, self._finishing = self._finishing, False
            return self._seek() if finishing else []
        self.step, self._installing = self._installing, -1
        self._slots.free_all()
        self._versions.begin_step()
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
        following = view.ending or view.takes_part(self.me, self.step)
        begins, ends = following and not self.following, self.following and not following
        self.following = following
        if begins:
            self._versions.unknown()
        news: list[Effect] = [Follow(server, following) for server in sorted(self._links)] if begins or ends else []
        return [*news, *self._seek()]

    def _rewind(self, view: View) -> None:
        """All members go back to `view.origin`."""
        self._start_generation(view)
        self._finishing = self._finishing or (self.in_order and self._installing >= 0)
        self._installing = -1
        self._wanted = frozenset()
        self._versions.forget_all()
        self._delivered = [set() for _ in range(self.shards)]
        self._assists.clear()

    def _forget(self, shards: Iterable[int]) -> None:
        """Nothing is known to have reached these shards' primary; what was on its way to or from it is lost."""
        for shard in shards:
            self._delivered[shard].clear()
            self._versions.asked[shard] = -1
            if self._slots[shard] in (Slot.QUEUED, Slot.LANDING):
                self._slots[shard] = Slot.FREE

    def _changes(self, shard: int, target: int) -> bool:
        """Does the target have another version of this shard than the model?"""
        return self.step < 0 or self.cadence.changes(shard, self.step, target)

    def _in_place(self, shard: int, target: int) -> bool:
        """Is what the target needs of this shard here, in the model or in its slot?"""
        return not self._changes(shard, target) or self._versions.landed(shard, target)

    def _needs(self, shard: int, replica: int) -> bool:
        """Has the shard not had this replica's contribution to the step in progress from us, and may it still?"""
        return (
            self._versions.newest[shard] <= self.step and replica not in self._delivered[shard]
            and self.contributes(shard, replica) and self._home(shard) in self._links
        )  # fmt: skip

    def _seek(self) -> list[Effect]:
        """Fetch what exists of the target, is not here, and is not coming by itself."""
        target = self.target
        if target < 0 or not self.following or self._finishing:
            return []
        effects: list[Effect] = []
        for shard in range(self.shards):
            wanted = self._versions.wanted(shard, target) and self._changes(shard, target)
            if wanted and self._home(shard) in self._links:
                self._versions.asked[shard] = self._versions.right(shard, target)
                effects.append(Fetch(shard, self.cadence.updates_before(shard, target), self._home(shard)))
        return effects

    # ---- invariants ----

    def validate(self) -> None:
        """AssertionError, with a sentence, if an invariant does not hold."""
        SlotMachine.validate(self)
        self._versions.validate()
        assert self._installing < 0 or self._installing > self.step, f"it goes from {self.step} to {self._installing}"
        assert not self._wanted or self.computing, "shards are wanted of no replica"
        assert self.step <= self.steps, f"step {self.step} of {self.steps}"
        sent = {shard for shard, replicas in enumerate(self._delivered) if replicas}
        assert not sent or 0 <= self.step < self.steps, f"contributions to {sent} outside of any step"
