"""What is decided in an undisturbed simulated job, computed without any cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rallypoint.core.decisions import Decided, Rules, reductions_at
from rallypoint.core.view import View


def figure_of(model: Sequence[Any]) -> float:
    """What an evaluation of a model comes to."""
    return float(hash(tuple(model)) % (1 << 52))


def rate_in(view: View | None, step: int) -> int:
    """How often the learning rate of the update of that step is reduced, by the view."""
    return 0 if view is None else reductions_at(view.reductions, step)


class Undisturbed:
    """The decisions of a job of so many steps that evaluates after each `every` steps."""

    def __init__(self, rules: Rules, every: int, steps: int) -> None:
        self._rules, self._every, self._steps = rules, every, steps
        self.decided = Decided()

    @property
    def end(self) -> int:
        """The job's last version."""
        return self._steps if self.decided.stop is None else self.decided.stop.version

    def evaluated(self, version: int, model: Sequence[Any]) -> None:
        """The job has come to this version."""
        if self._rules.steers and 0 < version <= self.end and (version % self._every == 0 or version == self._steps):
            following = min(self.end, version // self._every * self._every + self._every)
            figures = {"figure": figure_of(model)}
            self.decided = self.decided.after(
                self._rules, version, figures, following if following > version else None
            )

    def rate(self, step: int) -> int:
        """As `rate_in`."""
        return reductions_at(self.decided.reductions, step)
