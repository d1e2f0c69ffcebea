"""The one thread that owns a server's shards (or an aggregator's parts). With a single owner no tensor needs a lock."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)


class Handler(Protocol[E_contra]):
    """What the thread calls. The reducer and the relay implement it."""

    def handle(self, event: E_contra) -> None:
        """Handle one event."""

    def idle_work(self) -> Callable[[], None] | None:
        """A function to call while the inbox is empty; None if there is nothing to do."""

    def close(self) -> None:
        """The job is over."""


class Owner(Generic[E]):
    """Passes the inbox's events to the reducer, in order, on its own thread.

    Any thread may `put` an event. An exception in the reducer ends the thread; `failed` is called with it.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self.reducer: Handler[E] | None = None  # set once, before any event of a job is put into the inbox
        self._failed = failed
        self._inbox: queue.SimpleQueue[E | None] = queue.SimpleQueue()
        self._began: float | None = None  # to handle the event in progress
        self.put = self._inbox.put
        self.thread = threading.Thread(target=self._run, name="reduce", daemon=True)
        self.thread.start()

    @property
    def busy_s(self) -> float:
        """For how many seconds the thread has handled one event; 0.0 while it waits for the next."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def waiting(self) -> int:
        """How many events are in the inbox."""
        return self._inbox.qsize()

    def stop(self) -> None:
        """End the thread, after the events that are already in the inbox."""
        self.put(None)
        self.thread.join()
        if self.reducer is not None:
            self.reducer.close()

    def _run(self) -> None:
        try:
            while (event := self._next()) is not None:
                self._began = time.monotonic()
                if self.reducer is not None:
                    self.reducer.handle(event)
                self._began = None
        except Exception as error:  # after any error the shards can no longer be trusted: the job must end
            self._failed(error)

    def _next(self) -> E | None:
        while True:
            work = self.reducer.idle_work() if self.reducer is not None else None
            try:
                return self._inbox.get(block=work is None)
            except queue.Empty:
                assert work is not None
                work()
