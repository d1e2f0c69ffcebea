"""What this worker tells the coordinator of evaluations: which its script has, and their results."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from rallypoint.core.deciding.decisions import StopWhen
from rallypoint.core.typed import MOST_METRICS
from rallypoint.core.view import ViewNumber
from rallypoint.net.messages import Evaluated, Evaluates, Message, Metrics, NotKept

_REPEATED = 64  # evaluations


class EvaluationReports:
    """Sends them with `send`, and repeats them to the next coordinator. Any thread may call it."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._lock = send, threading.Lock()
        self._registered: Evaluates | None = None
        self._metrics: deque[Metrics] = deque(maxlen=_REPEATED)
        self._versions: deque[Evaluated | NotKept] = deque(maxlen=_REPEATED)

    def registered(self, periods: Iterable[int], *, high: bool, stops: Iterable[StopWhen] = ()) -> None:
        """The script has evaluations with these periods, and these rules by which they end the job."""
        with self._lock:
            self._registered = Evaluates(tuple(periods), high, tuple(stops))
            self._send(self._registered)

    def evaluated(self, metrics: Metrics) -> None:
        """One evaluation has returned figures."""
        with self._lock:
            self._metrics.append(metrics)
            self._send(metrics)

    def version_evaluated(self, version: int, generation: ViewNumber, figures: Mapping[str, float]) -> None:
        """All evaluations that are due with `version` have run, with these figures."""
        with self._lock:
            told = Evaluated(version, generation, dict(islice(figures.items(), MOST_METRICS)))
            self._versions.append(told)
            self._send(told)

    def not_kept(self, version: int, generation: ViewNumber) -> None:
        """No server has that version any more."""
        with self._lock:
            told = NotKept(version, generation)
            self._versions.append(told)
            self._send(told)

    def repeat(self, *, new: bool) -> None:
        """The coordinator has admitted this worker (again): it may have been sent into a link that was broken already.

        Nothing that a worker did before counts if it is `new`.
        """
        with self._lock:
            told: list[Message] = [] if self._registered is None else [self._registered]
            if not new:
                told += [*self._metrics, *self._versions]
            for message in told:
                self._send(message)
