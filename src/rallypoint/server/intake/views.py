"""The view in force, for all threads that read from connections; and whether the job is over."""

from __future__ import annotations

import threading

from rallypoint.core.shard.links import Fence
from rallypoint.core.view import View, ViewNumber
from rallypoint.errors import ProtocolError

VIEW_TIMEOUT_S = 60.0  # a coordinator may be away for a while


class Views:
    """Set by the coordinator's link, read by everybody. `over` is set when the job has ended, with or without a
    `failure`; what waits for a view then goes on at once."""

    def __init__(self) -> None:
        self.view: View | None = None
        self.over = threading.Event()
        self.failure: str | None = None
        self._fence = Fence()
        self._changed = threading.Condition()  # a new view, or the end

    @property
    def number(self) -> ViewNumber:
        """The view's number."""
        return self._fence.number

    def is_new(self, view: View) -> bool:
        """Is it newer than the one that is known?"""
        return not self._fence.known or view.number > self._fence.number

    def adopt(self, view: View) -> None:
        """Take a view: whoever waits for it goes on."""
        with self._changed:
            if self._fence.adopt(view):
                self.view = view
            self._changed.notify_all()

    def wait_for(self, number: ViewNumber) -> None:
        """Until the view of that number has come here too (I10): what is said under it is meant for it."""
        if self._fence.has_come(number):
            return
        with self._changed:
            known = self._changed.wait_for(
                lambda: self.over.is_set() or self._fence.has_come(number),
                VIEW_TIMEOUT_S if self._fence.known else None,
            )
        if not known:
            raise ProtocolError(f"view {number} has not come here within {VIEW_TIMEOUT_S:.0f} s: is it of this job?")

    def is_stale(self, number: ViewNumber) -> bool:
        """Was it said in a generation that is over? Nobody accepts that any more (I10)."""
        return self._fence.is_stale(number)

    def end(self, failure: str | None) -> None:
        """The job is over; the first word counts."""
        with self._changed:
            if not self.over.is_set():
                self.failure = failure
                self.over.set()
                self._changed.notify_all()
