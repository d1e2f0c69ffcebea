"""The job's end, as one worker knows it: whether its model holds the last version, and whether it has seen to that.

The last version is the job's last round, or an earlier one if the script has stopped the job (`orders.stop`). A worker
may learn of an earlier one when its model holds it already.
"""

from __future__ import annotations

from rallypoint.core.decisions import is_due
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.slots import Action, Compute, Ended, Evaluate, SlotMachine, Store

End = tuple[ViewNumber, int]
Reached = tuple[ViewNumber, int]


class Ending:
    """Whether the model holds the last version. `reached` is a claim: it names the generation and the version (I10)."""

    def __init__(self, machine: SlotMachine) -> None:
        self._machine = machine
        self._taken: End | None = None

    @property
    def reached(self) -> End | None:
        """The generation and the job's last version, if the model holds that; else None."""
        machine = self._machine
        holds = machine.view is not None and 0 <= machine.step == machine.steps
        return (machine.view.generation, machine.step) if holds and machine.view is not None else None

    @property
    def due(self) -> bool:
        """True if the model holds the last version, and the main thread does not know it yet."""
        return not self._machine.computing and self.reached not in (None, self._taken)

    def take(self) -> End | None:
        """Return `reached`; the main thread knows of it from now on."""
        self._taken = self.reached or self._taken
        return self.reached


class Reaching:
    """Which version the model holds, where a view asks for it (`orders.handover`, `orders.warming`).

    It is said once in each view that asks: what came while the coordinator had another view counts for nothing, and the
    next one may ask for the same step. Of a worker that warms up, it is said of each version: what it held when it came
    may be old.

    A worker that has a version has all of its shards, so each of them has had every contribution to the steps before
    it. Who says too much makes work be done again, and nothing else.
    """

    def __init__(self, machine: SlotMachine) -> None:
        self._machine = machine
        self._said: tuple[ViewNumber, int | None, int | None] | None = None

    def take(self) -> Reached | None:
        """What to say now to the coordinator; None: nothing, or it was said already."""
        view, step = self._machine.view, self._machine.step
        if view is None or step < 0:
            return None
        held = view.orders.handover if view.orders.handover is not None and step >= view.orders.handover else None
        warms = self._machine.me in view.orders.warming
        about = (view.number, held, step if warms else None)
        if about == self._said or (held is None and not warms):
            return None
        self._said = about
        return view.generation, step

    def again(self) -> None:
        """Say it once more: it may have been lost."""
        self._said = None


# What a worker's views say of evaluations: which version it is to evaluate now, and whether it has to wait for one.


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
        lease, me = view.orders.lease, self._machine.me
        if lease is None or (view.generation, version) in self._over:
            return False
        if version == lease.version:
            return lease.holder == me
        passed = lease.version < version < lease.until and view.lead(version) == me
        return passed and any(is_due(every, version, version - 1, ends=False) for every in self.periods)

    def due(self, view: View | None, action: Action | Store | Ended | None) -> Evaluate | None:
        """The version to evaluate now, where `action` would be next; None if there is none."""
        if view is None or (lease := view.orders.lease) is None or not (action is None or isinstance(action, Compute)):
            return None
        waits = self._machine.takes_part and self._machine.step < lease.version
        if not waits and self.evaluates(view, lease.version):
            return Evaluate(lease.version)
        step = self._machine.step
        passes = action is not None and action.step == step and self.evaluates(view, step)
        return Evaluate(step) if passes else None

    def holds_back(self, view: View | None, action: Action | Store | Ended | None) -> bool:
        """True if this replica may not be computed yet: see `Lease.until`, `orders.paused` and `orders.handover`."""
        if not isinstance(action, Compute) or view is None:
            return False
        if any(before is not None and action.step >= before for before in (view.orders.paused, view.orders.handover)):
            return True
        return bool(self.periods) if view.orders.lease is None else action.step >= view.orders.lease.until

    def awaited(self, view: View) -> str:
        """A phrase for what a worker waits for which is held back."""
        if view.orders.paused is not None:
            return f"the operator, who has paused the job before step {view.orders.paused}"
        if view.orders.handover is not None:
            return f"shards to move to other servers before step {view.orders.handover}"
        if (lease := view.orders.lease) is None:
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
        if back or (lease := view.orders.lease) is None:
            self._over.clear()
            return
        lost = lease.version if lease.holder != self._machine.me else None
        self._over = {
            (generation, version) for generation, version in self._over
            if generation == view.generation and version >= lease.version and version != lost
        }  # fmt: skip
