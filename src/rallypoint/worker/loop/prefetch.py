"""Loads this worker's micro-batches: the next one while versions arrive, or several ahead in loader processes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from rallypoint.data.loader import LastBatch
from rallypoint.data.places import Place
from rallypoint.data.processes import LoaderProcesses
from rallypoint.data.streams.once import StreamOver
from rallypoint.observe.trace import LOAD
from rallypoint.worker.exchange.exchange import Exchange, Rewound
from rallypoint.worker.loop.parts import Parts

_OVER = "the stream is over, replica {} has no full batch after it"


class Prefetch:
    """What the loop asks for micro-batches. Main thread only.

    Without loader processes it loads there too, so a data set may use the global random generators. The span "load" is
    the time for which the loop has waited for a micro-batch.

    Where a stream ends, it tells the coordinator with which step the job is to end.
    """

    def __init__(self, parts: Parts) -> None:
        self._batches, self._tracer, self._say = parts.batches, parts.tracer, parts.say
        self._stopping, self._exchange = parts.stopping, parts.exchange
        self._ready: tuple[Place, Any, int] | None = None
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
            with suppress(StreamOver):  # `take` meets it again
                self._ready = place, *self._load(place)

    def take(self, place: Place) -> Any:
        """Return this micro-batch; load it if it is not loaded yet. Raises DataError as `MicroBatches.load`; Rewound
        where the job ends before this step, because a stream has no batch for it."""
        ready, self._ready = self._ready, None  # one of another place has been loaded in vain, and may be of the past
        batch, left_out = ready[1:] if ready is not None and ready[0] == place else self._loaded(place)
        self._batches.computes(*place, left_out)
        if not isinstance(batch, LastBatch):
            return batch
        step, replica, _ = place
        self._stopping.wish(_OVER.format(replica), step=step)
        return self._batches.on_device(batch)

    def close(self) -> None:
        """End the loader processes."""
        if self._processes is not None:
            self._processes.close()

    def _loaded(self, place: Place) -> tuple[Any, int]:
        step, replica, _ = place
        try:
            return self._load(place)
        except StreamOver:
            self._stopping.end_before(step, _OVER.format(replica), self._exchange)
            raise Rewound from None

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
