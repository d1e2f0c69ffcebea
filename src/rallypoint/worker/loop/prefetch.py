"""Loads this worker's micro-batches: the next one while versions arrive, or several ahead in loader processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rallypoint.data.loader import LastBatch, MicroBatches
from rallypoint.data.places import Place
from rallypoint.data.processes import LoaderProcesses
from rallypoint.observe.trace import LOAD, Tracer
from rallypoint.worker.exchange.exchange import Exchange


class Prefetch:
    """What the loop asks for micro-batches. Main thread only.

    Without loader processes it loads there too, so a data set may use the global random generators. The span "load" is
    the time for which the loop has waited for a micro-batch.

    Attributes:
        last: true if a stream has no full batch for the replica after the micro-batch that was taken last.
    """

    def __init__(self, batches: MicroBatches, tracer: Tracer, say: Callable[[str], None]) -> None:
        """`say` shows a line to the user."""
        self._batches, self._tracer, self._say = batches, tracer, say
        self._ready: tuple[Place, Any, int] | None = None
        self.last = False
        self._processes = LoaderProcesses(batches, say) if batches.loader.workers else None

    def coming(self, exchange: Exchange) -> None:
        """Before the first version: in a job that does not go on from a snapshot, have the first samples fetched."""
        view, fresh = exchange.view, exchange.step < 0 and not exchange.view.origin
        if self._processes is not None and fresh and (mine := view.replicas_of(exchange.me, 0)):
            self._processes.coming(0, mine[0], mine)

    def expect(self, round: int, replica: int, replicas: tuple[int, ...]) -> None:
        """This worker computes `replica` now, and has these `replicas` (ascending) in this round."""
        if self._processes is not None:
            self._processes.expect(round, replica, replicas)

    def load(self, place: Place) -> None:
        """Load this micro-batch now, unless it is loaded already, or processes load it."""
        if self._processes is None and (self._ready is None or self._ready[0] != place):
            self._ready = place, *self._load(place)

    def take(self, place: Place) -> Any:
        """Return this micro-batch; load it if it is not loaded yet. Raises DataError as `MicroBatches.load`."""
        if self._ready is not None and self._ready[0] == place:
            (_, batch, left_out), self._ready = self._ready, None
        else:
            batch, left_out = self._load(place)
        self.last = isinstance(batch, LastBatch)
        self._batches.computes(*place, left_out)
        return self._batches.on_device(batch) if self.last else batch

    def close(self) -> None:
        """End the loader processes."""
        if self._processes is not None:
            self._processes.close()

    def _load(self, place: Place) -> tuple[Any, int]:
        """The micro-batch, and how many samples are left out of it (unknown, so 0, with loader processes)."""
        step, replica, index = place
        with self._tracer.span(LOAD, step=step, replica=replica):
            if self._processes is not None:
                return self._moved(self._processes.take(place)), 0
            batch, skipped = self._batches.loaded(step, replica, index)
            for sentence in skipped:
                self._say(sentence)
            return self._moved(batch), len(skipped)

    def _moved(self, batch: Any) -> Any:
        """On the device; a stream's last batch is moved when it is taken."""
        return batch if isinstance(batch, LastBatch) else self._batches.on_device(batch)
