"""The one thread that owns a coordinator's shell: events come into its inbox, and it does the acts that follow."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from rallypoint.coordinator import inbox
from rallypoint.errors import RallypointError


class Owner:
    """Calls `handle(event)` for each event, one at a time, and every `tick_s` seconds with `Ticked`.

    A tick that is due waits for the events that were there when it fell due, and for none that came later: a sign of
    life that has come counts, and a flood of events does not stop the clock. Any thread may `put`.
    An exception of `handle` becomes `Ended`: nobody else would be told of anything any more.
    """

    def __init__(self, handle: Callable[[inbox.Event], None], tick_s: float) -> None:
        self._handle, self._tick_s = handle, tick_s
        self._inbox: queue.SimpleQueue[inbox.Event | inbox.Barrier | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="coordinate", daemon=True)

    def start(self) -> None:
        """Begin to handle what comes."""
        self._thread.start()

    def put(self, event: inbox.Event | inbox.Barrier) -> None:
        """To be handled after all that came before."""
        self._inbox.put(event)

    def stop(self) -> None:
        """End the thread, after what it has to do."""
        self._inbox.put(None)
        self._thread.join()

    def is_alive(self) -> bool:
        """Does the thread run?"""
        return self._thread.is_alive()

    def _run(self) -> None:
        due, before_tick = time.monotonic(), 0
        while True:
            left = due - time.monotonic()
            if left > 0:
                before_tick = -1
            elif before_tick < 0:
                before_tick = self._inbox.qsize()
            event: inbox.Event | inbox.Barrier | None = inbox.Ticked()
            if before_tick != 0:
                with contextlib.suppress(queue.Empty):
                    event = self._inbox.get(timeout=max(0.0, left))
                before_tick -= before_tick > 0
            if event is None:
                return
            if isinstance(event, inbox.Barrier):
                event.reached()
                continue
            if isinstance(event, inbox.Ticked):
                due, before_tick = time.monotonic() + self._tick_s, -1
            self._take(event)

    def _take(self, event: inbox.Event) -> None:
        try:
            self._handle(event)
        except Exception as error:
            why = str(error) if isinstance(error, RallypointError) else f"{type(error).__name__}: {error}"
            self._handle(inbox.Ended(f"the coordinator failed: {why}"))
