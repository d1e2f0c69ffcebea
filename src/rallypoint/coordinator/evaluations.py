"""The figures of evaluations, kept for each version: a snapshot is judged by those of its own."""

from __future__ import annotations

from collections.abc import Mapping

_REMEMBERED = 64  # versions


class Evaluations:
    """Metrics by step of training. Several evaluations of one step are merged; the oldest steps are forgotten."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[str, float]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Add what one evaluation of `step` found; all that is known of that step."""
        known = self._by_step.setdefault(step, {})
        known.update(values)
        while len(self._by_step) > _REMEMBERED:
            del self._by_step[min(self._by_step)]
        return dict(known)

    def of(self, step: int) -> dict[str, float]:
        """What is known of that step; empty if nothing is."""
        return dict(self._by_step.get(step, {}))

    def rewind(self, step: int) -> None:
        """The job goes back to `step`: what was found of later ones is stale."""
        self._by_step = {known: values for known, values in self._by_step.items() if known <= step}
