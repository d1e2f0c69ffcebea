"""The job's end, as one worker knows it: whether its model holds the last version, and whether it has seen to that.

The last version is the job's last round, or an earlier one if the script has stopped the job (`View.stop`). A worker
may learn of an earlier one when its model holds it already.
"""

from __future__ import annotations

from typing import Protocol

from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker.machine import SlotMachine
from rallypoint.core.worker.slots import Action, Compute, Ended, Evaluate, Store

End = tuple[ViewNumber, int]
Reached = tuple[ViewNumber, int]


class Installing(Protocol):
    """What it asks of the worker's machine."""

    me: str
    step: int
    steps: int
    view: View | None

    @property
    def computing(self) -> bool: ...


class Ending:
    """Whether the model holds the last version. `reached` is a claim: it names the generation and the version (I10)."""

    def __init__(self, machine: Installing) -> None:
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
    """Which version the model holds, where a view asks for it (`View.handover`, `View.warming`).

    It is said once in each view that asks: what came while the coordinator had another view counts for nothing, and the
    next one may ask for the same step. Of a worker that warms up, it is said of each version: what it held when it came
    may be old.

    A worker that has a version has all of its shards, so each of them has had every contribution to the steps before
    it. Who says too much makes work be done again, and nothing else.
    """

    def __init__(self, machine: Installing) -> None:
        self._machine = machine
        self._said: tuple[ViewNumber, int | None, int | None] | None = None

    def take(self) -> Reached | None:
        """What to say now to the coordinator; None: nothing, or it was said already."""
        view, step = self._machine.view, self._machine.step
        if view is None or step < 0:
            return None
        held = view.handover if view.handover is not None and step >= view.handover else None
        warms = self._machine.me in view.warming
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
    """

    def __init__(self, machine: SlotMachine) -> None:
        self._machine = machine
        self.evaluates = False  # the script has evaluations: nothing is computed before a view says how far
        self._over: tuple[ViewNumber, int] | None = None  # the generation and version that it has seen to

    def due(self, view: View | None, action: Action | Store | Ended | None) -> Evaluate | None:
        """The version to evaluate now, where `action` would be next; None if there is none."""
        if view is None or (lease := view.lease) is None or lease.holder != self._machine.me:
            return None
        if self._over == (view.generation, lease.version) or not (action is None or isinstance(action, Compute)):
            return None
        waits = self._machine.takes_part and self._machine.step < lease.version
        return None if waits else Evaluate(lease.version)

    def holds_back(self, view: View | None, action: Action | Store | Ended | None) -> bool:
        """True if this replica may not be computed yet: see `Lease.until`, `View.paused` and `View.handover`."""
        if not isinstance(action, Compute) or view is None:
            return False
        if any(before is not None and action.step >= before for before in (view.paused, view.handover)):
            return True
        return self.evaluates if view.lease is None else action.step >= view.lease.until

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
        self._over = (generation, version)

    def lost(self) -> None:
        """What it said of an evaluation may not count, and is to be made again if a view says so: the worker was given
        up, or another one has got the lease: a coordinator whose journal was full may have lost the result."""
        self._over = None
