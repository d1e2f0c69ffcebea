"""What a tracker is: where a run's curves and events go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run, for its tracker.

    Attributes:
        name: the name of its folder.
        settings: how it was started.
        step: the first step that will be logged. Whatever the tracker has of this step and later ones is void.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    step: int = 0


class Tracker(Protocol):
    """Takes the figures of one run. Implementations pass `rallypoint.testing.contracts.trackers`.

    `start` comes first, and again whenever the run goes back to an earlier step, or is tracked again from a step on.
    Steps rise between two calls of it. Any method may raise, and may take its time: a tracker has a process of its own.

    One that prints, in ten lines::

        class Printing:
            def start(self, run): print(f"{run.name} from step {run.step}")
            def log(self, step, scalars): print(step, *(f"{name} {value:.4g}" for name, value in scalars.items()))
            def event(self, step, text): print(step, text)
            def flush(self): pass
            def close(self): print("over")
    """

    def start(self, run: RunFacts) -> None:
        """Begin, or go back to ``run.step``."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the figures of a step: ``{"loss": 2.5, "lr": 0.001}``. Values may be nan or infinite."""

    def event(self, step: int, text: str) -> None:
        """Take a sentence about what has happened after `step`."""

    def flush(self) -> None:
        """Make durable what was taken."""

    def close(self) -> None:
        """The end: make everything durable. May be called twice, and without `start`."""
