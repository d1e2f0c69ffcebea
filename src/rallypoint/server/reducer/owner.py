"""The one thread that owns a server's shards: single owner, so no tensor has a lock."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from rallypoint.server.reducer.inbox import Event


class Handler(Protocol):
    """What the thread runs: the reducer."""

    def handle(self, event: Event) -> None:
        """Take one event."""

    def idle_work(self) -> Callable[[], None] | None:
        """What there is to do while the inbox is empty; None: nothing."""

    def close(self) -> None:
        """The job is over."""


class Owner:
    """Hands what is in the inbox to the reducer, in order. `failed` hears of the error that ended the thread."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self.reducer: Handler | None = None  # set once, before anything is put into the inbox that concerns a job
        self._failed = failed
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.put = self._inbox.put
        self.thread = threading.Thread(target=self._run, name="reduce", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread after what is in the inbox."""
        self.put(None)
        self.thread.join()
        if self.reducer is not None:
            self.reducer.close()

    def _run(self) -> None:
        try:
            while (event := self._next()) is not None:
                if self.reducer is not None:
                    self.reducer.handle(event)
        except Exception as error:  # whatever it was, the shards can no longer be trusted: the job must end
            self._failed(error)

    def _next(self) -> Event | None:
        while True:
            work = self.reducer.idle_work() if self.reducer is not None else None
            try:
                return self._inbox.get(block=work is None)
            except queue.Empty:
                assert work is not None
                work()
