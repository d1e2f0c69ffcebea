"""The script of a simulated job that stops before its last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rallypoint.core.decisions import Decided, Rules, reductions_at
from rallypoint.core.protocol import Stop
from rallypoint.core.view import View, ViewNumber


@dataclass(frozen=True)
class ScriptStops:
    """The script stops the job: it calls `run.stop` where it computes `replica` of `step`, or (`leaves`) it breaks out
    of its loop before it computes anything of `step` or of a later one."""

    step: int
    replica: int
    leaves: bool = False

    @property
    def version(self) -> int:
        """The version with which the job ends, whatever happens."""
        return self.step if self.leaves else self.step + 1


@dataclass(slots=True)
class Script:
    """What the script has said of the job's end, last in the generation `said_in`.

    Attributes:
        left: the version that needs nothing more of a worker that has left its loop; -1: its loop goes on.
    """

    planned: ScriptStops | None
    view: Callable[[], View | None]
    send: Callable[[Stop], None]
    said: bool = False
    left: int = -1
    said_in: ViewNumber | None = None

    def stops(self, step: int, replica: int) -> bool:
        """Does it call `run.stop` here, and does not everybody know it yet?"""
        view, planned = self.view(), self.planned
        if planned is None or planned.leaves or (planned.step, planned.replica) != (step, replica):
            return False
        if view is None or view.orders.stop is not None:
            return False
        self.said = True
        self.say()
        return True

    def leaves(self, step: int) -> bool:
        """Does it leave its loop here, or has it?"""
        planned = self.planned
        return self.left >= 0 or (planned is not None and planned.leaves and step >= planned.step)

    def leave(self, step: int) -> None:
        """It leaves its loop, or it should compute this step and has left it."""
        if step != self.left:
            self.left, self.said, self.said_in = step, True, None
        self.say()

    def say(self, *, again: bool = False) -> None:
        """Tell the coordinator of it: once in each generation, until a view says it."""
        view = self.view()
        stop = None if view is None else view.orders.stop
        told = stop is not None and (self.left < 0 or stop.version <= self.left)
        if not self.said or view is None or told or (view.generation == self.said_in and not again):
            return
        assert self.planned is not None
        self.said_in = view.generation
        self.send(Stop(self.planned.step + 1, "the script says so", self.left, view.generation))


# What is decided in an undisturbed simulated job, computed without any cluster.


def figure_of(model: Sequence[Any]) -> float:
    """What an evaluation of a model comes to."""
    return float(hash(tuple(model)) % (1 << 52))


class Undisturbed:
    """The decisions of a job of so many steps that evaluates after each `every` steps."""

    def __init__(self, rules: Rules, every: int, steps: int) -> None:
        self._rules, self._every, self._steps = rules, every, steps
        self.decided = Decided()

    @property
    def end(self) -> int:
        return self._steps if self.decided.stop is None else min(self._steps, self.decided.stop.version)

    def evaluated(self, version: int, model: Sequence[Any]) -> None:
        """The job has come to this version."""
        if self._rules.steers and 0 < version <= self.end and (version % self._every == 0 or version == self._steps):
            following = version // self._every * self._every + self._every if version < self.end else None
            self.decided = self.decided.after(self._rules, version, {"figure": figure_of(model)}, following)

    def rate(self, step: int) -> int:
        return reductions_at(self.decided.reductions, step)
