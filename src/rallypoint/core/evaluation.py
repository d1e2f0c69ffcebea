"""When evaluations are due: a pure function of their periods and of the versions' steps."""

from __future__ import annotations

from collections.abc import Iterable


def is_due(every: int, step: int, before: int, *, ends: bool) -> bool:
    """True if an evaluation with the period `every` (steps) is due with the version of `step`.

    `before` is the step of the version before it; `ends`: the job ends with this one. Examples, with ``every=10``: due
    at 10 after 9, at 12 after 8, at 7 if the job ends there; never at 0.
    """
    return step > 0 and (ends or step // every > before // every)


def any_due(periods: Iterable[int], step: int, before: int, *, ends: bool) -> bool:
    """True if one of the evaluations with these periods is due: see `is_due`."""
    return any(is_due(every, step, before, ends=ends) for every in periods)
