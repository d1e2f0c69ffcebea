"""The worker's machine where a step's forward pass begins before all of the step's version is here.

Example: the model holds version 7, and all that this worker contributes to step 7 is sent. The shards of the first
layers have version 8. The machine answers `Compute(8, replica)`. The forward pass of step 8 begins; before a module
runs, the main thread `takes` the module's shards of version 8 and swaps them with what the model holds:

    LANDED -> OLD         the model has the shard's version 8; its slot has version 7

Before the backward pass begins, all of version 8 is here and in the model (`Installed`). Only then the slots may take
gradients: nobody pushes for step 8 before it has all shards at version 8.

If step 7 needs something of this worker after all (a server died, a replica moved, a backup task), the forward pass is
`rewound`: the main thread swaps everything back, and the model holds version 7 again. Nothing has to be fetched.

    OLD -> LANDED         the forward pass was given up
    OLD -> FREE           all of the version is installed; or a new generation began, and the forward pass was given up
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rallypoint.core.worker.aligned import WorkerMachine, is_owed
from rallypoint.core.worker.machine import SlotMachine
from rallypoint.core.worker.slots import (
    Action,
    Arriving,
    Assisted,
    Compute,
    Effect,
    Event,
    Filled,
    Installed,
    Landed,
    LinkUp,
    ReplicaAbandoned,
    Sent,
    Slot,
    Viewed,
)


@dataclass(slots=True)
class OverlapMachine(WorkerMachine):
    """The machine of one worker whose forward passes may begin early, once the main thread allows it."""

    _may_begin_early: bool = False

    # ---- questions ----

    @property
    def early(self) -> bool:
        """True while a forward pass runs whose version is not installed: from `take(Compute(...))` to `Installed`."""
        return self._installing >= 0 and self._computing is not None

    @property
    def reads(self) -> int:
        """The version that the replica in progress reads."""
        return self._installing if self.early else self.step

    def next_action(self) -> Action | None:
        """Like WorkerMachine's, and the next step's first replica where the main thread would have to wait."""
        action = WorkerMachine.next_action(self)
        if action is not None or not self._may_begin_early or self._initialise or self._installing >= 0:
            return action
        upcoming = self.upcoming
        if upcoming is None or self.computing or self.target != self.step + 1 or not self._all_sent:
            return None
        return Compute(*upcoming)

    def here(self, shards: Iterable[int]) -> bool:
        """True if these shards of the version that is being installed are in the model, or complete in their slots."""
        target = self.target
        return all(self._in_place(shard, target) for shard in shards)

    @property
    def _all_sent(self) -> bool:
        return not any(is_owed(self, replica) for replica in self.assigned)

    # ---- what the main thread does ----

    def allow_early(self, allowed: bool) -> None:
        """Allow (or not) that `next_action` begins the next step before all of its version is here."""
        self._may_begin_early = allowed

    def take(self, action: Action | None) -> bool:
        """Like SlotMachine's. A `Compute` of the next step begins its forward pass early."""
        begins_early = isinstance(action, Compute) and action.step == self.step + 1
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
        """Take one event; return the effects, to be run in order."""
        if isinstance(event, (Filled, Sent, Landed)):
            return WorkerMachine.handle(self, event)  # of one shard: nothing that is early becomes stale by it
        early = self.early
        if isinstance(event, ReplicaAbandoned):
            self._installing = -1 if early else self._installing
            self._swapped_back()
        effects = WorkerMachine.handle(self, event)
        if early and isinstance(event, Installed):
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
            case Arriving():
                return self._versions.newest.lowest > self._installing  # every shard is past it
            case Viewed() | LinkUp() | Assisted():
                assert self.view is not None
                if self._computing not in self.view.replicas_of(self.me, self._installing):
                    return True
                return any(self._needs(shard, replica) for replica in self.assigned for shard in range(self.shards))
        return False

    def _in_place(self, shard: int, target: int) -> bool:
        return (self._slots[shard] is Slot.OLD and self.early) or WorkerMachine._in_place(self, shard, target)

    # ---- invariants ----

    def validate(self) -> None:
        """Raise AssertionError with a sentence if an invariant does not hold."""
        WorkerMachine.validate(self)
        for shard, slot in enumerate(self._slots):
            assert slot is not Slot.FILLING or not self.early, f"slot {shard} is filled before its version is whole"
            given_up = self.rewound and self._computing is not None
            assert slot is not Slot.OLD or self.early or given_up, f"slot {shard} holds an older version"
