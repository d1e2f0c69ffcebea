"""The worker's machine in an aligned job: what to compute, what to send, which versions to receive and install.

Example: R = 6, and worker 0 has replicas 0..3 at step 7. It computes each of them from version 7 and sends the
contributions. When all shards have version 8 it installs version 8, and step 8 begins.

Recovery is to do the work again (I2). When a link breaks, a server is replaced or a replica moves, this worker marks
the contributions that may not have reached the shard's primary as not delivered. It then computes and sends them again.
The model keeps the version of the step in progress until every shard of the next version is here, so the worker can
always do that.

A version can arrive while its slot is being written (another worker computed the same replica). The machine then
discards it and fetches it later (I5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rallypoint.core.audits import Audits, peers
from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.sums import Part, Presum, leaf
from rallypoint.core.typed import HasSent
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker import slots
from rallypoint.core.worker.slots import Action, Effect, Event, Slot, SlotMachine, Unanimity, Versions


@dataclass(slots=True)
class Duties:
    """What worker `me` computes for others' audits: in a job without audits, nothing."""

    me: str
    replicas: tuple[int, ...] = ()  # of the step in progress

    def plan(self, view: View, step: int, presum: Presum) -> None:
        """A step begins, or a view is in force: plan these replicas, and what is added up."""
        presum.plan(view.replicas_of(self.me, step))

    def takes(self, view: View, step: int, replica: int) -> bool:
        """True if servers take this replica's contribution from this worker."""
        return view.takes(self.me, (replica,))


@dataclass(slots=True)
class AuditDuties(Duties):
    """The same in a job with `audits`. Nothing is added up in a step that is audited."""

    audits: Audits = field(kw_only=True)
    # The step, the view's number, is it alone, replicas to send anyway
    _planned: tuple[int, ViewNumber, bool, frozenset[int]] = (-1, ViewNumber(), False, frozenset())

    def plan(self, view: View, step: int, presum: Presum) -> None:
        """Servers keep digests of what waits for another opinion. So where the opinion that they have is to be enough
        now (this worker is left alone, or nobody can decide a dispute) this worker sends again. So it does if it has
        missed views: in one of them it may not have been enough.
        """
        own = view.replicas_of(self.me, step)
        audited = step >= 0 and self.audits.audited(step)
        self.replicas = self.audits.duties(view, self.me, step) if audited else ()
        presum.plan(() if audited else own)
        alone = audited and peers(view, step, self.me) == [self.me]
        open = frozenset(d.replica for d in view.orders.disputes if d.step == step and not d.third and d.replica in own)
        before, number, was_alone, were_open = self._planned
        self._planned = (step, view.number, alone, open)
        missed = view.number not in (number, ViewNumber(number.epoch, number.count + 1))
        if before == step:
            presum.forget(own if alone and (missed or not was_alone) else open - (frozenset() if missed else were_open))

    def takes(self, view: View, step: int, replica: int) -> bool:
        return self.audits.may_contribute(view, self.me, step) or view.takes(self.me, (replica,))


@dataclass(slots=True)
class WorkerMachine(SlotMachine):
    """The machine of one worker in an aligned job; `step` is the version that the model holds.

    Versions count the job's rounds here, also where rounds are staggered: the machine converts the shard's own version
    in a frame to the next round in which the shard takes contributions (`Cadence.round_of`), and back when it sends.
    """

    cadence: Cadence = TOGETHER
    audits: Audits | None = None
    _duties: Duties = field(init=False)
    _versions: Versions = field(init=False)
    _here: Unanimity = field(init=False)
    _wanted: frozenset[int] = frozenset()  # the shards that the replica in progress is computed for
    _assists: set[int] = field(default_factory=set)
    _settled: set[int] = field(default_factory=set)  # replicas of which nothing is owed at the step in progress
    _finishing: bool = False  # an install of a now stale version must still end, or the model is mixed (`in_order`)

    def __post_init__(self) -> None:
        SlotMachine.__post_init__(self)
        self._versions = Versions(self._slots, self.cadence)
        self._duties = Duties(self.me) if self.audits is None else AuditDuties(self.me, audits=self.audits)
        self._here = Unanimity(self.shards)

    # ---- questions the shell asks ----

    @property
    def target(self) -> int:
        """The version to install next: the following one, or a later one if every shard is past it; -1 if unknown.

        No worker pushes for step t+1 before it has all shards at t+1. So when every shard is at t+1 or later, step t
        has all of its contributions and needs none from this worker.
        """
        if self._installing >= 0:
            return self._installing
        known = self._versions.newest.lowest
        if self.in_order and known >= 0:
            return self.step + 1 if self.step >= 0 else self._versions.whole.lowest
        return -1 if known < 0 else max(self.step + 1, known)

    def next_action(self) -> Action | None:
        """The main thread's next action; None when it has to wait. Changes nothing that can be seen: see `is_owed`."""
        if self._initialise:
            return slots.UploadFirst() if self._may_initialise else None
        if self.complete:
            return slots.Install(self.target)
        if not 0 <= self.step < self.steps or self._versions.newest.lowest < 0:
            return None  # no shard's version is known: this step may be over
        for replica in self.assigned:
            if is_owed(self, replica) and any(self._needs(shard, replica) for shard in range(self.shards)):
                return slots.Compute(self.step, replica)
        return None

    @property
    def complete(self) -> bool:
        """True when every shard of `target` is here and the main thread can install it."""
        if self._computing is not None or (target := self.target) < 0:
            return False
        return self._here.holds(partial(self._in_place, target=target))

    @property
    def takes_part(self) -> bool:
        return self.view is not None and self.view.takes_part(self.me, self.step)

    @property
    def upcoming(self) -> tuple[int, int] | None:
        """The (step, replica) that this worker computes first after the next install; None if unknown or none."""
        if not self.following or self.view is None or not 0 <= self.step < self.steps - 1:
            return None
        replicas = self.view.replicas_of(self.me, self.step + 1)
        return (self.step + 1, replicas[0]) if replicas else None

    @property
    def assigned(self) -> Sequence[int]:
        """The replicas to compute at the step in progress, ascending: its own, backup tasks, then those it audits."""
        assigned = self.view.replicas_of(self.me, self.step) if self.view is not None else ()
        own = sorted({*assigned, *self._assists})
        return [*own, *(replica for replica in self._duties.replicas if replica not in own)]

    def may_fill(self, shard: int) -> bool | None:
        """True if the gradient may be written into the slot now; False: wait; None: nobody needs this gradient."""
        if self._slots[shard] is Slot.FILLING:
            return True
        if shard not in self._wanted or self._versions.newest[shard] > self.step:
            return None
        return self._slots[shard] is Slot.FREE

    @property
    def missing(self) -> list[int]:
        """The shards whose version of `target` is not here."""
        target = self.target
        return [shard for shard in range(self.shards) if not self._in_place(shard, target)]

    @property
    def changed(self) -> list[int]:
        """The shards that the install in progress copies: those that the model does not hold already."""
        return [shard for shard in range(self.shards) if self._changes(shard, self._installing)]

    @property
    def row_version(self) -> int | None:
        return max(0, self.step)

    def contributes(self, shard: int, replica: int) -> bool:
        """True if `replica` contributes to `shard` at the step in progress."""
        return SlotMachine.contributes(self, shard, replica) and self.cadence.due(shard, self.step)

    def _begin_replica(self, replica: int) -> None:
        SlotMachine._begin_replica(self, replica)
        self._wanted = frozenset(shard for shard in range(self.shards) if self._needs(shard, replica))

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; return the effects, to be run in order."""
        match event:
            case slots.Filled(shard=shard, part=part):
                return self._filled(shard, part)
            case slots.SlotSent(shard=shard, serial=serial):
                self._slots.sent(shard, serial)
                return self._seek(shard)
            case slots.Arriving():
                return self._arriving(event)
            case slots.Landed(shard=shard):
                if self._slots[shard] is Slot.LANDING:
                    self._slots[shard] = Slot.LANDED
                return self._seek() if self._versions.held[shard] != self.cadence.next_due(shard, self.target) else []
            case slots.ReplicaComputed() | slots.ReplicaAbandoned():
                self._computing, self._wanted, self.rewound = None, frozenset(), False
                self._slots.free(Slot.FILLING)
                return self._seek()
            case slots.Installed():
                return self._installed()
            case slots.ToWait():
                return []  # only servers of streaming jobs make a replica wait
            case slots.Assisted(step=step, replica=replica):
                if step == self.step:
                    self._assists.add(replica)
                return []
            case slots.LinkUp(server=server):
                self._links.add(server)
                return [slots.Follow(server)] if self.following else []
            case slots.LinkLost(server=server):
                self._links.discard(server)
                if self._uploads_first_weights() and any(self._versions.newest[s] < 0 for s in self._at([server])):
                    self._initialise = True  # the uploaded weights may be lost: upload again
                self._forget(self._at([server]))
                return []
            case slots.Viewed(view=view):
                return self._viewed(view)

    def _filled(self, shard: int, part: Part | None) -> list[Effect]:
        home, over = self._home(shard), self._versions.newest[shard] > self.step
        # Servers refuse what it computes if it was given up meanwhile, also when it has joined again.
        computed = self._computing
        taken = self.view is not None and computed is not None and self._duties.takes(self.view, self.step, computed)
        use = taken and not self.rewound and not over
        part = part or Part((), leaf(self._computing or 0), keep=False)
        block = self.presum.filled(shard, part, use=use, send=home in self._links)
        if block is None:
            if part.merges:
                self._settled.clear()  # what was kept of other replicas is dropped perhaps
            self._slots[shard] = Slot.FREE
            return self._seek()
        own, serial = self.cadence.updates_before(shard, self.step), self._slots.queue(shard)
        return [slots.Send(shard, own, block.start, home, serial, self._number, count=block.size)]

    def _arriving(self, event: slots.Arriving) -> list[Effect]:
        shard, version = event.shard, self.cadence.round_of(event.shard, event.version)
        if self.view is None or event.view < self.view.generation:
            return [slots.DropArriving(shard)]
        if event.begins and self.step >= 0:
            # It begins a generation whose view this worker has not received yet. The view opens new links, and the
            # server sends this again.
            return [slots.DropArriving(shard)]
        before = self.target
        self._versions.exists(shard, version, whole=event.whole)
        target = self.target
        right = self.cadence.next_due(shard, target)
        usable = not self._finishing and (event.whole or self.step >= 0)
        # While no version of the other shards is known (at the start, or after joining), take any version that comes.
        expected = version > self.cadence.next_due(shard, self.step) and right in (-1, version)
        if usable and expected and self._versions.has_room(shard, right):
            self._slots[shard] = Slot.LANDING
            self._versions.held[shard] = version
            landing: list[Effect] = [slots.Land(shard)]
            return landing if target == before else [*landing, *self._seek()]
        return [slots.DropArriving(shard), *self._seek()]

    def _installed(self) -> list[Effect]:
        if self._installing < 0:  # a new generation began during the install
            finishing, self._finishing = self._finishing, False
            return self._seek() if finishing else []
        self.step, self._installing = self._installing, -1
        self._slots.free_all()
        self._versions.begin_step()
        self.presum.clear()
        assert self.view is not None
        self._duties.plan(self.view, self.step, self.presum)
        self._assists.clear()
        self._settled.clear()
        return self._seek()

    def _viewed(self, view: View) -> list[Effect]:
        self._settled.clear()
        rerouted = self.view is not None and view.number == self.view.number and view.primary != self.view.primary
        if self.view is not None and view.number <= self.view.number and not rerouted:
            return []
        before, stayed = self._take_view(view)
        if before is None or before.generation != view.generation:
            self._rewind(view)
        else:
            moved = self._moved(before, view, stayed)  # (a link that has not ended may be bringing a version)
            landing = {s for s in moved if self._slots[s] is Slot.LANDING and before.primary.get(s) in self._links}
            self._forget(shard for shard in moved if shard not in landing)
        if self.computing and self.reads >= self.steps:
            self.rewound = True  # the job ends before that step
        self._duties.plan(view, self.step, self.presum)
        following = view.orders.ending or self.me in view.orders.warming or view.takes_part(self.me, self.step)
        begins, ends = following and not self.following, self.following and not following
        self.following = following
        if begins:
            self._versions.unknown()
        changed = sorted(self._links) if begins or ends else ()
        return [*(slots.Follow(server, following) for server in changed), *self._seek()]

    def _rewind(self, view: View) -> None:
        """A new generation starts from `view.origin`: drop everything of the old one."""
        self._start_generation(view)
        self._finishing = self._finishing or (self.in_order and self._installing >= 0)
        self._installing = -1
        self._wanted = frozenset()
        self._versions.forget_all()
        self.presum.clear()
        self._assists.clear()

    def _forget(self, shards: Iterable[int]) -> None:
        """The link to these shards' primary is lost: count all contributions as not delivered, all fetches as lost."""
        self._settled.clear()
        for shard in shards:
            self.presum.lost(shard)
            self._versions.asked[shard] = -1
            if self._slots[shard] in (Slot.QUEUED, Slot.LANDING):
                self._slots[shard] = Slot.FREE

    def _changes(self, shard: int, target: int) -> bool:
        """True if version `target` has other values in this shard than the model."""
        return self.step < 0 or self.cadence.changes(shard, self.step, target)

    def _in_place(self, shard: int, target: int) -> bool:
        """True if the shard's values for version `target` are here: in the model, or in the slot."""
        same = self.step >= 0 and not self.cadence.changes(shard, self.step, target)  # `_changes`, without its call
        return same or self._versions.landed(shard, target)

    def _needs(self, shard: int, replica: int) -> bool:
        """True if this worker still has to send the shard this replica's contribution, and can."""
        return owes(self, shard, replica) and self._home(shard) in self._links

    def _seek(self, only: int | None = None) -> list[Effect]:
        """Fetch the shards of `target` (or `only` that one) that exist on a server, are not here, and are not fetched.
        """
        target = self.target
        if target < 0 or not self.following or self._finishing:
            return []
        effects: list[Effect] = []
        for shard in range(self.shards) if only is None else (only,):
            wanted = self._versions.wanted(shard, target) and self._changes(shard, target)
            if wanted and self._home(shard) in self._links:
                self._versions.asked[shard] = self.cadence.next_due(shard, target)
                effects.append(slots.Fetch(shard, self.cadence.updates_before(shard, target), self._home(shard)))
        return effects

    def validate(self) -> None:
        SlotMachine.validate(self)
        self._versions.validate()
        self.presum.validate()
        assert self._installing < 0 or self._installing > self.step, f"it goes from {self.step} to {self._installing}"
        owed = [r for r in self._settled if any(owes(self, shard, r) for shard in range(self.shards))]
        assert not owed, f"replicas {owed} count as settled, and are owed"
        assert not self._wanted or self.computing, "shards are wanted of no replica"
        assert self.step <= self._rounds, f"step {self.step} of {self.steps}"
        assert not self.presum.sent or 0 <= self.step < self._rounds, f"sent to {self.presum.sent} outside of any step"


def owes(machine: WorkerMachine, shard: int, replica: int) -> bool:
    """True if this worker still has to send the shard this replica's contribution."""
    newest, sent = machine._versions.newest[shard], machine.presum.has(shard, replica)
    return newest <= machine.step and not sent and machine.contributes(shard, replica)


def is_owed(machine: WorkerMachine, replica: int) -> bool:
    """True if this worker still has to send some shard this replica's contribution. What is settled stays so until
    `_settled` is cleared: it is not looked for in all shards at each arrival."""
    if replica in machine._settled:
        return False
    if any(owes(machine, shard, replica) for shard in range(machine.shards)):
        return True
    machine._settled.add(replica)
    return False


def unapplied(machine: SlotMachine) -> list[int]:
    """The shards to which this worker has contributed at the step in progress, and whose next version is not known to
    exist. None where there is no step that all are at."""
    if not isinstance(machine, WorkerMachine):
        return []
    return sorted(shard for shard in machine.presum.sent if machine._versions.newest[shard] <= machine.step)


def sent_of(machine: SlotMachine) -> HasSent:
    """Which shards have all that this worker owes them at the step in progress."""
    if not isinstance(machine, WorkerMachine):
        return "none"
    owed = {s for s in range(machine.shards) if any(owes(machine, s, replica) for replica in machine.assigned)}
    if machine.presum.sent <= owed:
        return "none"
    return "some" if owed else "all"


def is_between(machine: SlotMachine, before: View, view: View) -> bool:
    """True if shards move between two steps (`orders.handover`), and nothing of those that do is on its way here."""
    if not isinstance(machine, WorkerMachine) or before.orders.handover is None:
        return False
    if machine.step < before.orders.handover or machine.computing:
        return False
    busy, asked, sent = (Slot.QUEUED, Slot.LANDING), machine._versions.asked, machine.presum.sent
    return not any(machine.slots[s] in busy or asked[s] >= 0 or s in sent for s in view.moved(before))


@dataclass(slots=True)
class OverlapMachine(WorkerMachine):
    """The machine of one worker whose forward passes may begin early, once the main thread allows it: before all of the
    step's version is here.

    Example: the model holds version 7, and all that this worker contributes to step 7 is sent. The shards of the first
    layers have version 8. The machine answers `Compute(8, replica)`. The forward pass of step 8 begins; before a module
    runs, the main thread `takes` the module's shards of version 8 and swaps them with what the model holds:

        LANDED -> OLD         the model has the shard's version 8; its slot has version 7

    Before the backward pass begins, all of version 8 is here and in the model (`Installed`). Only then the slots may
    take gradients: nobody pushes for step 8 before it has all shards at version 8.

    If step 7 needs something of this worker after all (a server died, a replica moved, a backup task), the forward pass
    is `rewound`: the main thread swaps everything back, and the model holds version 7 again. Nothing has to be fetched.

        OLD -> LANDED         the forward pass was given up
        OLD -> FREE           all of the version is installed; or a new generation began, and it was given up
    """

    _may_begin_early: bool = False

    # ---- questions ----

    @property
    def early(self) -> bool:
        """True while a forward pass runs whose version is not installed: from `take(Compute(...))` to `Installed`."""
        return self._installing >= 0 and self._computing is not None

    @property
    def reads(self) -> int:
        return self._installing if self.early else self.step

    def next_action(self) -> Action | None:
        """Like WorkerMachine's, and the next step's first replica where the main thread would have to wait."""
        action = WorkerMachine.next_action(self)
        if action is not None or not self._may_begin_early or self._initialise or self._installing >= 0:
            return action
        upcoming = self.upcoming
        if upcoming is None or self.computing or self.target != self.step + 1:
            return None
        if any(is_owed(self, replica) for replica in self.assigned):
            return None
        return slots.Compute(*upcoming)

    def here(self, shards: Iterable[int]) -> bool:
        """True if these shards of the version that is being installed are in the model, or complete in their slots."""
        target = self.target
        return all(self._in_place(shard, target) for shard in shards)

    # ---- what the main thread does ----

    def allow_early(self, allowed: bool) -> None:
        """Allow (or not) that `next_action` begins the next step before all of its version is here."""
        self._may_begin_early = allowed

    def take(self, action: Action | None) -> bool:
        """Like SlotMachine's. A `Compute` of the next step begins its forward pass early."""
        begins_early = isinstance(action, slots.Compute) and action.step == self.step + 1
        if not SlotMachine.take(self, action):
            return False
        if begins_early:
            self._installing, self._wanted = self.step + 1, frozenset()
        return True

    def to_swap(self, shards: Iterable[int]) -> list[int]:
        """Give these shards, which are all `here`, to the main thread: it swaps slot and model.

        Returns those that the model does not hold yet.
        """
        new = [shard for shard in shards if self._slots[shard] is Slot.LANDED]
        for shard in new:
            self._slots[shard] = Slot.OLD
        return new

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        if isinstance(event, (slots.Filled, slots.SlotSent, slots.Landed)):
            return WorkerMachine.handle(self, event)  # of one shard: nothing that is early becomes stale by it
        early = self.early
        if isinstance(event, slots.ReplicaAbandoned):
            self._installing = -1 if early else self._installing
            self._swapped_back()
        effects = WorkerMachine.handle(self, event)
        if early and isinstance(event, slots.Installed):
            assert self._computing is not None
            self._begin_replica(self._computing)  # the forward pass goes on; now its gradients are wanted
        elif self.early and self._is_stale(event):
            self.rewound = True
        return effects

    def _swapped_back(self) -> None:
        """The model holds what it held before the forward pass began, and the slots what came."""
        for shard, slot in enumerate(self._slots):
            if slot is Slot.OLD:
                self._slots[shard] = Slot.LANDED if self._versions.held[shard] >= 0 else Slot.FREE

    def _is_stale(self, event: Event) -> bool:
        """True if `event` means that the forward pass that began early must be given up."""
        match event:
            case slots.Arriving():
                return self._versions.newest.lowest > self._installing  # every shard is past it
            case slots.Viewed() | slots.LinkUp() | slots.Assisted():
                assert self.view is not None
                if self._computing not in self.view.replicas_of(self.me, self._installing):
                    return True
                return any(self._needs(shard, replica) for replica in self.assigned for shard in range(self.shards))
        return False

    def _in_place(self, shard: int, target: int) -> bool:
        return (self._slots[shard] is Slot.OLD and self.early) or WorkerMachine._in_place(self, shard, target)

    def validate(self) -> None:
        WorkerMachine.validate(self)
        for shard, slot in enumerate(self._slots):
            assert slot is not Slot.FILLING or not self.early, f"slot {shard} is filled before its version is whole"
            given_up = self.rewound and self._computing is not None
            assert slot is not Slot.OLD or self.early or given_up, f"slot {shard} holds an older version"
