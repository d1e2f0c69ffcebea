"""The first steps of a replica's round that were computed before the round's version was here (LocalSteps, delay)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from rallypoint.core.view import ViewNumber

R = TypeVar("R")


@dataclass(slots=True)
class GoneAhead(Generic[R]):
    """Of one replica at a time: the one that is computed first in the next round. `R` is what the steps came to."""

    _of: tuple[int, int, ViewNumber] | None = None  # round, replica, generation
    _results: R | None = None

    def has(self, round: int, replica: int) -> bool:
        """True if the first steps of this round were computed for the replica, stale or not."""
        return self._of is not None and self._of[:2] == (round, replica)

    def is_over(self, round: int, replica: int, generation: ViewNumber) -> bool:
        """True if they were computed, and are not stale: the replica has to wait for the version now."""
        return self._of == (round, replica, generation)

    def made(self, round: int, replica: int, generation: ViewNumber, results: R) -> None:
        """The first steps are made. They began in `generation`."""
        self._of, self._results = (round, replica, generation), results

    def resume(self, round: int, replica: int, generation: ViewNumber) -> R | None:
        """The version is here: return what the steps came to; None if the replica made none, or they are stale."""
        if self._of is None or self._of[1] != replica:
            return None
        (of, results), (self._of, self._results) = (self._of, self._results), (None, None)
        return results if of == (round, replica, generation) else None
