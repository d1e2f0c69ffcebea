"""Functions that keep their last answer: most of what a view is made of stays as it was in the view before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Remembered(Generic[P, R]):
    """A function, which returns its last answer again if its arguments are equal to the last ones.

    Nothing but the arguments may decide its answer, and nobody may change them or the answer afterwards. Example: with
    `placed = Remembered(place)` the second of two calls `placed(shards, ("a", "b"))` places nothing.

    It is no closure, so that a machine which has one can be recorded (`observe.recording`).
    """

    __slots__ = ("_function", "_last")

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._last: tuple[object, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._last is None or self._last[0] != (args, kwargs):
            self._last = (args, kwargs), self._function(*args, **kwargs)
        return self._last[1]
