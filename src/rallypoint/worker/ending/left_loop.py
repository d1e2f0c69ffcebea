"""The replica in whose micro-batch the script has left its loop: by a `break`, or by an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from rallypoint.errors import RallypointError
from rallypoint.worker.exchange.exchange import Rewound
from rallypoint.worker.sources.source import DeltaSource


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
