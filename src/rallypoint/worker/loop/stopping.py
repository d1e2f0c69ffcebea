"""What the script says of the job's end: `run.stop()`, or it leaves its loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from rallypoint.core.view import View, ViewNumber
from rallypoint.net.messages import Message, Stop

LONGEST = 200  # characters of a reason


class Stopping:
    """Tells the coordinator that the script stops the job, in each generation until a view says so.

    The main thread calls `wish` and `say`; the coordinator's link calls `adopted` and `repeat`. `why_not` is the
    sentence that refuses it; "" if it can.

    Attributes:
        wanted: the script's reason, until `say`; None: it has not asked for it.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._lock = send, threading.Lock()
        self._said: Stop | None = None
        self.wanted: str | None = None
        self.why_not = ""

    def wish(self, reason: str) -> None:
        """The script wants to stop: it is said when the step in progress can be held back."""
        if self.wanted is None:
            self.wanted = " ".join(reason.split())[:LONGEST] or "run.stop()"

    def say(self, version: int, generation: ViewNumber, *, left: int = -1) -> None:
        """Tell the coordinator that the job is to end with `version`. For `left` see `core.cluster.events.Stopped`."""
        with self._lock:
            reason = self._said.reason if self._said is not None else self.wanted or ""
            version = self._said.version if self._said is not None else version
            self._said = Stop(version, reason, left, generation)
            self._send(self._said)

    @property
    def said(self) -> bool:
        """True once the coordinator was told."""
        return self._said is not None

    def adopted(self, view: View) -> None:
        """A view has come."""
        if (said := self._said) is not None and said.generation != view.generation:
            self.repeat(view)

    def repeat(self, view: View | None) -> None:
        """The coordinator may not know: say it again, unless the view says it."""
        with self._lock:
            if self._said is None or view is None or (view.stop is not None and self._said.left < 0):
                return
            self._said = msgspec.structs.replace(self._said, generation=view.generation)
            self._send(self._said)
