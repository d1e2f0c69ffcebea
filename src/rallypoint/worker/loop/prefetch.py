"""Loads this worker's micro-batches, the next one while versions arrive."""

from __future__ import annotations

from typing import Any

from rallypoint.data.loader import MicroBatches
from rallypoint.observe.trace import LOAD, Tracer

Place = tuple[int, int, int]  # step, replica, index of the micro-batch


class Prefetch:
    """Loads on the main thread, so a data set may use the global random generators."""

    def __init__(self, batches: MicroBatches, tracer: Tracer) -> None:
        self._batches, self._tracer = batches, tracer
        self._ready: tuple[Place, Any] | None = None

    def load(self, place: Place) -> None:
        """Load this micro-batch now, unless it is loaded already."""
        if self._ready is None or self._ready[0] != place:
            self._ready = place, self._load(place)

    def take(self, place: Place) -> Any:
        """Return this micro-batch; load it if it is not loaded yet."""
        if self._ready is not None and self._ready[0] == place:
            batch, self._ready = self._ready[1], None
            return batch
        return self._load(place)

    def _load(self, place: Place) -> Any:
        step, replica, index = place
        with self._tracer.span(LOAD, step=step, replica=replica):
            return self._batches.load(step, replica, index)
