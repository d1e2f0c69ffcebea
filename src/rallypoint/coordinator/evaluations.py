"""The metrics of evaluations, by step of training: a snapshot's manifest gets those of its step."""

from __future__ import annotations

from collections.abc import Mapping

_REMEMBERED = 64  # versions


class Evaluations:
    """Metrics by step of training. It merges several evaluations of a step, and keeps the newest 64 steps."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[str, float]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Add the metrics of one evaluation of `step`. Returns all metrics of that step."""
        known = self._by_step.setdefault(step, {})
        known.update(values)
        while len(self._by_step) > _REMEMBERED:
            del self._by_step[min(self._by_step)]
        return dict(known)

    def of(self, step: int) -> dict[str, float]:
        """All metrics of that step; empty if there are none."""
        return dict(self._by_step.get(step, {}))

    def rewind(self, step: int) -> None:
        """Drop the metrics of steps after `step`: the job goes back to it."""
        self._by_step = {known: values for known, values in self._by_step.items() if known <= step}
