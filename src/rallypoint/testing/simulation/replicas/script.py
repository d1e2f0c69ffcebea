"""The script of a simulated job that stops before its last step."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.view import View, ViewNumber
from rallypoint.net.messages import Stop


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
    said: bool = False
    left: int = -1
    said_in: ViewNumber | None = None

    def stops(self, step: int, replica: int) -> bool:
        """Does it call `run.stop` here?"""
        planned = self.planned
        return planned is not None and not planned.leaves and (planned.step, planned.replica) == (step, replica)

    def leaves(self, step: int) -> bool:
        """Does it leave its loop here, or has it?"""
        planned = self.planned
        return self.left >= 0 or (planned is not None and planned.leaves and step >= planned.step)

    def leave(self, step: int) -> None:
        """It leaves its loop, or it should compute this step and has left it."""
        if step != self.left:
            self.left, self.said, self.said_in = step, True, None

    def says(self, view: View | None, *, again: bool = False) -> Stop | None:
        """What to tell the coordinator of it: once in each generation, until a view says it; None: nothing."""
        told = view is not None and view.stop is not None and (self.left < 0 or view.stop.version <= self.left)
        if not self.said or view is None or told or (view.generation == self.said_in and not again):
            return None
        assert self.planned is not None
        self.said_in = view.generation
        return Stop(self.planned.step + 1, "the script says so", self.left, view.generation)
