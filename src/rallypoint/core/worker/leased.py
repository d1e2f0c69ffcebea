"""What a worker's views say of evaluations: which version it is to evaluate now, and whether it has to wait for one."""

from __future__ import annotations

from rallypoint.core.deciding.decisions import is_due
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.machine import SlotMachine
from rallypoint.core.worker.slots import Action, Compute, Ended, Evaluate, Store


class LeasedVersion:
    """Says when the version whose lease the view gives to this worker is to be evaluated.

    A worker that stands by begins at once, also if that version does not exist yet, and stops when there is something
    else to do. A worker that trains does it before its next replica, as soon as its own model has come to that version.

    The coordinator is not on the path of a step (I7). Where nothing is decided from evaluations, training goes on past
    the next versions that are due while an earlier one is leased: the lead evaluates each before it computes its step.
    """

    def __init__(self, machine: SlotMachine) -> None:
        self._machine = machine
        self.periods: tuple[int, ...] = ()  # of the script's evaluations; with some, no step begins without a lease
        self._over: set[tuple[ViewNumber, int]] = set()  # the generations and versions that it has seen to

    def evaluates(self, view: View, version: int) -> bool:
        """True if this worker is to evaluate that version before it computes that step."""
        lease, me = view.lease, self._machine.me
        if lease is None or (view.generation, version) in self._over:
            return False
        if version == lease.version:
            return lease.holder == me
        passed = lease.version < version < lease.until and view.lead(version) == me
        return passed and any(is_due(every, version, version - 1, ends=False) for every in self.periods)

    def due(self, view: View | None, action: Action | Store | Ended | None) -> Evaluate | None:
        """The version to evaluate now, where `action` would be next; None if there is none."""
        if view is None or (lease := view.lease) is None or not (action is None or isinstance(action, Compute)):
            return None
        waits = self._machine.takes_part and self._machine.step < lease.version
        if not waits and self.evaluates(view, lease.version):
            return Evaluate(lease.version)
        step = self._machine.step
        passes = action is not None and action.step == step and self.evaluates(view, step)
        return Evaluate(step) if passes else None

    def holds_back(self, view: View | None, action: Action | Store | Ended | None) -> bool:
        """True if this replica may not be computed yet: see `Lease.until`, `View.paused` and `View.handover`."""
        if not isinstance(action, Compute) or view is None:
            return False
        if any(before is not None and action.step >= before for before in (view.paused, view.handover)):
            return True
        return bool(self.periods) if view.lease is None else action.step >= view.lease.until

    def awaited(self, view: View) -> str:
        """A phrase for what a worker waits for which is held back."""
        if view.paused is not None:
            return f"the operator, who has paused the job before step {view.paused}"
        if view.handover is not None:
            return f"shards to move to other servers before step {view.handover}"
        if (lease := view.lease) is None:
            return "the coordinator to say who evaluates"
        if lease.until <= lease.version:  # what is decided counts from a later one on
            return f"a snapshot of step {lease.until} to begin, because it is evaluated"
        return f"the evaluation of step {lease.version} by {lease.holder or 'a worker'}, before step {lease.until}"

    def over(self, generation: ViewNumber, version: int) -> None:
        """It has evaluated that version, or nobody can any more."""
        self._over.add((generation, version))

    def adopt(self, view: View, *, back: bool) -> None:
        """A view is in force. What this worker said of an evaluation may not count, and is to be made again if a view
        says so, where the worker was given up and came `back`, and where another one has got the lease of that version:
        a coordinator whose journal was full may have lost the result."""
        if back or (lease := view.lease) is None:
            self._over.clear()
            return
        lost = lease.version if lease.holder != self._machine.me else None
        self._over = {
            (generation, version) for generation, version in self._over
            if generation == view.generation and version >= lease.version and version != lost
        }  # fmt: skip
