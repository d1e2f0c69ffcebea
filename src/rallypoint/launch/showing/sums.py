"""What is shown of a job of sums: a script with a loop of its own has no steps and no loss that servers know."""

from __future__ import annotations

import time
from collections import deque

from rallypoint.net.sampling.messages import ScriptAt

_RATE_OVER_S = 10.0
_PLAIN_EVERY_S = 5.0


class SumsShown:
    """How many sums are made. `take` gets what the coordinator repeats, also while none is made."""

    def __init__(self) -> None:
        self._at, self._printed = ScriptAt(0), 0
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._last_plain = time.monotonic()

    def take(self, script: ScriptAt) -> None:
        """The furthest script is so far."""
        now, self._at = time.monotonic(), script
        self._recent.append((now, self._at.nbytes))
        while len(self._recent) > 2 and self._recent[0][0] < now - _RATE_OVER_S:
            self._recent.popleft()

    @property
    def line(self) -> str:
        """``120 sums  3.4 MB/s from each worker``."""
        (before, fewer), (now, more) = self._recent[0], self._recent[-1]
        return f"{_sums(self._at.sums)}  {(more - fewer) / max(now - before, 1e-3) / 1e6:,.1f} MB/s from each worker"

    def plain(self) -> str:
        """The line for a file, if it is time for one and more sums are made than when it was last asked for; or ""."""
        now = time.monotonic()
        if now - self._last_plain < _PLAIN_EVERY_S or self._at.sums == self._printed:
            return ""
        self._last_plain, self._printed = now, self._at.sums
        return self.line


def done_of(script: ScriptAt, seconds: float) -> str:
    """What follows ``done:``."""
    return (
        f"the scripts have ended after {_sums(script.sums)}, {script.nbytes / 1e6:,.1f} MB from each worker, "
        f"in {seconds:.1f} s"
    )


def _sums(number: int) -> str:
    return f"{number:,} sum{'s' * (number != 1)}"
