"""The job's end, as one worker knows it: whether its model holds the last version, and whether it has seen to that.

The last version is the job's last round, or an earlier one if the script has stopped the job (`View.stop`). A worker
may learn of an earlier one when its model holds it already.
"""

from __future__ import annotations

from typing import Protocol

from rallypoint.core.view import View, ViewNumber

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
