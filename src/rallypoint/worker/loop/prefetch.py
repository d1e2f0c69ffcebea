"""Loads this worker's micro-batches: the next one while versions arrive, or several ahead in loader processes."""

from __future__ import annotations

from typing import Any

from rallypoint.data.loader import LastBatch
from rallypoint.data.order import Place
from rallypoint.data.processes import LoaderProcesses
from rallypoint.observe.trace import LOAD
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.loop.parts import Parts


class Prefetch:
    """What the loop asks for micro-batches. Main thread only.

    Without loader processes it loads there too, so a data set may use the global random generators. The span "load" is
    the time for which the loop has waited for a micro-batch.

    Where a stream ends, it tells the coordinator with which step the job is to end.
    """

    def __init__(self, parts: Parts) -> None:
        self._batches, self._tracer, self._say = parts.batches, parts.tracer, parts.say
        self._stopping = parts.stopping
        self._ready: tuple[Place, Any] | None = None
        self._processes = LoaderProcesses(self._batches, self._say) if self._batches.loader.workers else None

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
            self._ready = place, self._load(place)

    def take(self, place: Place) -> Any:
        """Return this micro-batch; load it if it is not loaded yet. Raises DataError as `MicroBatches.load`."""
        ready, self._ready = self._ready, None  # one of another place has been loaded in vain, and may be of the past
        batch = ready[1] if ready is not None and ready[0] == place else self._load(place)
        if not isinstance(batch, LastBatch):
            return batch
        step, replica, _ = place
        self._stopping.wish(f"the stream is over, replica {replica} has no full batch after it", step=step)
        return self._batches.on_device(batch)

    def close(self) -> None:
        """End the loader processes."""
        if self._processes is not None:
            self._processes.close()

    def _load(self, place: Place) -> Any:
        step, replica, index = place
        with self._tracer.span(LOAD, step=step, replica=replica):
            if self._processes is not None:
                return self._moved(self._processes.take(place))
            batch, skipped = self._batches.loaded(step, replica, index)
            for sentence in skipped:
                self._say(sentence)
            return self._moved(batch)

    def _moved(self, batch: Any) -> Any:
        """On the device; a stream's last batch is moved when it is taken."""
        return batch if isinstance(batch, LastBatch) else self._batches.on_device(batch)
