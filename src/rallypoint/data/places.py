"""Which micro-batches a worker needs next: a pure function of the one that it needs now and of its replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from rallypoint.config import JobConfig

Place = tuple[int, int, int]  # step, replica, index of the micro-batch


def places_after(place: Place, replicas: tuple[int, ...], config: JobConfig) -> Iterator[Place]:
    """Yield the micro-batches that a worker with these `replicas` (ascending) needs after `place`, to the job's end.

    It is a forecast: the view may change, or a step be computed again. Each replica makes all steps of a round before
    the next replica begins. Example: replicas 2 and 3, one micro-batch a step: after (7, 2, 0) come (7, 3, 0),
    (8, 2, 0), (8, 3, 0).
    """
    step, replica, index = place
    round = step // config.steps_per_round
    yield from _of_step(step, replica, range(index + 1, config.accumulate))
    yield from _of_steps(range(step + 1, config.steps_of(round).stop), replica, config)
    yield from _later(round, replica, replicas, config)


def places_from(round: int, replica: int, replicas: tuple[int, ...], config: JobConfig) -> Iterator[Place]:
    """Yield what `replica` needs in this round, and all that the worker needs after that, as `places_after` does."""
    yield from _of_steps(config.steps_of(round), replica, config)
    yield from _later(round, replica, replicas, config)


class Forecast:
    """Places that are still to be requested, in order."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self._places, self._first = iter(places), list[Place]()

    @property
    def ended(self) -> bool:
        """True if there are no more."""
        if not self._first:
            self._first = list(islice(self._places, 1))
        return not self._first

    def pop(self) -> Place | None:
        """Remove and return the next one; None if there is none."""
        return None if self.ended else self._first.pop()

    def again(self, places: Sequence[Place]) -> None:
        """Put these in front."""
        self._places, self._first = chain(places, self._first, self._places), []


def _later(round: int, replica: int, replicas: tuple[int, ...], config: JobConfig) -> Iterator[Place]:
    for other in replicas[bisect_right(replicas, replica) :]:
        yield from _of_steps(config.steps_of(round), other, config)
    while replicas and (steps := config.steps_of(round := round + 1)):
        for other in replicas:
            yield from _of_steps(steps, other, config)


def _of_steps(steps: range, replica: int, config: JobConfig) -> Iterator[Place]:
    for step in steps:
        yield from _of_step(step, replica, range(config.accumulate))


def _of_step(step: int, replica: int, indices: range) -> Iterator[Place]:
    for index in indices:
        yield step, replica, index
