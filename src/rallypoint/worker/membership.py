"""The end of a worker's part in a job: what it says of that, and says again, and a loop that was left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from rallypoint.core.protocol import Done, Message, Stop
from rallypoint.core.view import View, ViewNumber
from rallypoint.errors import RallypointError
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.locked import Rewound
from rallypoint.worker.sources.hooks import DeltaSource

LONGEST = 200  # characters of a reason


class Stopping:
    """Tells the coordinator that the script stops the job, in each generation until a view says so, and that this
    worker holds the last version.

    The coordinator's link calls `adopted` and `repeat`.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._lock = send, threading.Lock()
        self._said: Stop | None = None
        self._done: Done | None = None
        self.wanted: str | None = None  # the script's reason; None: it has not asked for it
        self._from: int | None = None  # the step from which the wish counts; None: at once
        self.why_not = ""  # the sentence that refuses it; "" if the job's mode supports it

    def wish(self, reason: str, *, step: int | None = None) -> None:
        """The script wants to stop: it is said when the step in progress can be held back.

        `step`: the data end with this step, wherever a roll-back has brought the job meanwhile.
        """
        if self.wanted is None or (step is None and self._from is not None):
            self.wanted, self._from = " ".join(reason.split())[:LONGEST] or "run.stop()", step

    def say(self, version: int, generation: ViewNumber, *, left: int = -1) -> None:
        """Tell the coordinator that the job is to end with `version`. For `left` see `core.protocol.Stop`."""
        with self._lock:
            reason = self._said.reason if self._said is not None else self.wanted or ""
            version = self._said.version if self._said is not None else version
            self._said = Stop(version, reason, left, generation)
            self._send(self._said)

    def done(self, generation: ViewNumber, version: int) -> None:
        """Tell the coordinator that this worker holds the job's last version."""
        with self._lock:
            self._done = Done(generation, version)
            self._send(self._done)

    def heed(self, exchange: Exchange) -> None:
        """Main thread: if the script wants to stop, wait until all know that the job ends with the next version.

        Raises Rewound like `Exchange.check`.
        """
        if (self.wanted is None and self._said is None) or exchange.end.is_early:
            return
        if self._said is None and self._from is not None and exchange.step < self._from:
            return
        version = exchange.step + 1
        if version < exchange.end.last:
            if self._said is None:
                self.say(version, exchange.end.generation)
            exchange.end.wait_until_known()

    def leave(self, exchange: Exchange, reason: str, *, own: bool = False) -> None:
        """Main thread: the script has left its loop, for this reason if it gave no other.

        `own`: the loop is the script's, and all processes leave theirs here: the job ends with what they hold.
        """
        self.wish(reason)
        version = exchange.step + (not own)
        needed = exchange.step if exchange.end.computes() else version
        self.say(version, exchange.end.generation, left=needed)

    def adopted(self, view: View) -> None:
        """A view has come: in a new generation, nothing is done, and the coordinator has to be told again."""
        with self._lock:
            if self._done is not None and self._done.generation != view.generation:
                self._done = None
            if self._said is not None and self._said.generation != view.generation:
                self._repeat_stop(view)

    def repeat(self, view: View | None) -> None:
        """The coordinator may not know what this worker has said: say it again."""
        with self._lock:
            if view is not None:
                self._repeat_stop(view)
            if self._done is not None:
                self._send(self._done)

    def _repeat_stop(self, view: View) -> None:
        said, stop = self._said, view.orders.stop
        told = stop is not None and said is not None and said.left < 0 and stop.version <= said.version
        if said is not None and not told:
            self._said = msgspec.structs.replace(said, generation=view.generation)
            self._send(self._said)


class LeftLoop:
    """Main thread only. `finite` says whether the replica's losses are; `undo` gives up a forward pass begun early."""

    def __init__(self, source: DeltaSource, *, finite: Callable[[], bool], undo: Callable[[], None]) -> None:
        self._source, self._finite, self._undo = source, finite, undo
        self._left: tuple[int, bool] | None = None

    @property
    def known(self) -> bool:
        """True if the loop was left, and nothing has followed from it yet."""
        return self._left is not None

    def left(self, replica: int, *, whole: bool) -> None:
        """The loop was left in this replica; `whole`: its last backward pass is over."""
        self._left = replica, whole

    def end_replica(self) -> bool:
        """Send what is left of the replica, or give it up if it is not whole. Returns False if there is none."""
        if self._left is None:
            return False
        (replica, whole), self._left = self._left, None
        try:
            if not whole:
                raise Rewound
            self._send(replica)
        except Rewound:
            self._undo()
            self._source.abandon()
        return True

    def fails(self) -> None:
        """The script has failed: send what is left of the replica, if it is whole. What fails in that is not said."""
        (replica, whole), self._left = self._left or (-1, False), None
        if whole:
            with suppress(Rewound, RallypointError):
                self._send(replica)

    def _send(self, replica: int) -> None:
        self._source.end_step(finite=self._finite)
        self._source.end_replica(replica)
