"""Which workers' scripts have ended, in a job of sums: whoever waits for a sum of theirs would wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from rallypoint.net.messages import Message
from rallypoint.net.summing.messages import ScriptEnded

Heard = Callable[[str, Mapping[int, int]], None]


class Scripts:
    """Tells the coordinator that this worker's script has ended, and hears of the others. Any thread may call it."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._lock = send, threading.Lock()
        self._own: ScriptEnded | None = None
        self._others: dict[str, Mapping[int, int]] = {}
        self._listener: Heard | None = None

    def ended(self, sums: Mapping[int, int]) -> None:
        """This worker's script has asked for so many sums, by lane, and for no more."""
        with self._lock:
            self._own = self._own or ScriptEnded(dict(sums))
            self._send(self._own)

    def repeat(self) -> None:
        """The coordinator may not know it: say it again."""
        with self._lock:
            if self._own is not None:
                self._send(self._own)

    def heard(self, message: ScriptEnded) -> None:
        """That worker's script has ended."""
        with self._lock:
            self._others[message.worker] = message.sums
            listener = self._listener
        if listener is not None:
            listener(message.worker, message.sums)

    def listen(self, call: Heard) -> None:
        """Call this for each script that has ended, now or later."""
        with self._lock:
            self._listener = call
            known = dict(self._others)
        for worker, sums in known.items():
            call(worker, sums)
