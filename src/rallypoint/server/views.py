"""The current view, for all threads that receive from connections; and whether the job is over."""

from __future__ import annotations

import threading

from rallypoint.core.shard.links import Fence
from rallypoint.core.view import View, ViewNumber
from rallypoint.errors import ProtocolError

VIEW_TIMEOUT_S = 60.0  # long enough for a coordinator to restart


class Views:
    """The current view. The coordinator's link sets it; any thread may read it.

    `over` is set when the job has ended, with or without a `failure`. Threads that wait for a view then continue at
    once.
    """

    def __init__(self) -> None:
        self.view: View | None = None
        self.over = threading.Event()
        self.failure: str | None = None
        self._fence = Fence()
        self._changed = threading.Condition()  # a new view, or the end

    @property
    def number(self) -> ViewNumber:
        """The number of the current view."""
        return self._fence.number

    def is_new(self, view: View) -> bool:
        """Is the view newer than the current one?"""
        return not self._fence.known or view.number > self._fence.number

    def adopt(self, view: View) -> None:
        """Adopt a view and wake the threads that wait for it."""
        with self._changed:
            if self._fence.adopt(view):
                self.view = view
            self._changed.notify_all()

    def wait_for(self, number: ViewNumber, unless: threading.Event | None = None) -> None:
        """Block until this server knows the view of that number, because the frame was sent for it (I10).

        It ends too when `unless` is set with `end_wait`. ProtocolError if the view does not come within VIEW_TIMEOUT_S;
        before the first view there is no limit.
        """
        if self._fence.has_come(number):
            return
        with self._changed:
            known = self._changed.wait_for(
                lambda: self.over.is_set() or self._fence.has_come(number) or (unless is not None and unless.is_set()),
                VIEW_TIMEOUT_S if self._fence.known else None,
            )
        if not known:
            raise ProtocolError(f"view {number} has not come here within {VIEW_TIMEOUT_S:.0f} s: is it of this job?")

    def end_wait(self, unless: threading.Event) -> None:
        """Set this event, and wake who waits with it."""
        with self._changed:
            unless.set()
            self._changed.notify_all()

    def is_stale(self, number: ViewNumber) -> bool:
        """Was the frame sent in an older generation? Then it must be ignored (I10)."""
        return self._fence.is_stale(number)

    def end(self, failure: str | None) -> None:
        """The job is over. Only the first call counts."""
        with self._changed:
            if not self.over.is_set():
                self.failure = failure
                self.over.set()
                self._changed.notify_all()
