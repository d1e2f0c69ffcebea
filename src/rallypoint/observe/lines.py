"""Lines that others cause: without control characters, and not more of them than a person reads."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

from rallypoint.core.typed import counted, printable

log = logging.getLogger("rallypoint")

_SAME_S = 60.0
_MOST_KEYS = 64


def printable_lines(text: str) -> str:
    """The text with each of its lines `printable`, of whatever length."""
    return "\n".join(printable(line, len(line)) for line in text.split("\n"))


class Once:
    """Tells whether something was named before; it remembers the last `most` names. Not thread-safe."""

    def __init__(self, most: int = 64) -> None:
        self._names: deque[Hashable] = deque(maxlen=most)

    def is_new(self, name: Hashable) -> bool:
        """True the first time that this name is given."""
        if name in self._names:
            return False
        self._names.append(name)
        return True


class Allowance:
    """So much may be said: `burst` lines at once, then one each `every_s` seconds. Not thread-safe.

    Attributes:
        omitted: how many were not allowed; who says so sets it to 0.
    """

    def __init__(self, burst: int, every_s: float, now: float) -> None:
        self._burst, self._every_s = burst, every_s
        self._left, self._when = float(burst), now
        self.omitted = 0

    def left(self, now: float) -> int:
        """How many more are allowed at `now` (seconds)."""
        return int(min(self._burst, self._left + (now - self._when) / self._every_s))

    def take(self, now: float) -> bool:
        """True if one more is allowed at `now` (seconds); else it is only counted."""
        self._left = min(self._burst, self._left + (now - self._when) / self._every_s)
        self._when = now
        if self._left < 1.0:
            self.omitted += 1
            return False
        self._left -= 1.0
        return True


class Sparingly:
    """Warnings that somebody else can cause as often as he likes: `burst` at once, then one each `every_s` seconds.

    The next line that is written says how many were left out. Each line is `printable`. A line with a `key` is left out
    if one with the same was written in the last `_SAME_S` seconds. Thread-safe.
    """

    def __init__(self, burst: int = 10, every_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._allowance = clock, Allowance(burst, every_s, clock())
        self._written: dict[Hashable, float] = {}  # keys, and when; the last `_MOST_KEYS`
        self._last = ""  # the last line, written or left out
        self._lock = threading.Lock()

    def warn(self, text: str, key: Hashable = None) -> None:
        """Log this line, or only count it."""
        with self._lock:
            now, self._last = self._clock(), text
            if now - self._written.get(key, -math.inf) < _SAME_S:
                self._allowance.omitted += 1
                return
            if not self._allowance.take(now):
                return
            self._note(key, now)
            omitted, self._allowance.omitted = self._allowance.omitted, 0
        log.warning("%s%s", printable(text), f" ({counted(omitted, 'more such line')} before)" if omitted else "")

    def _note(self, key: Hashable, now: float) -> None:
        if key is not None:
            self._written.pop(key, None)
            self._written[key] = now
            if len(self._written) > _MOST_KEYS:
                del self._written[next(iter(self._written))]

    def close(self) -> None:
        """Say how many lines were left out at last, and the last of them: nothing beside it tells what they are."""
        with self._lock:
            omitted, self._allowance.omitted = self._allowance.omitted, 0
        if omitted:
            log.warning("%s, the last: %s", counted(omitted, "more such line"), printable(self._last))
