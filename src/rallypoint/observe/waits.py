"""Nothing waits without a name (I8): a long wait reports what it waits for, again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_WORD_S = 5.0
# Python runs signal handlers (Ctrl-C, SIGTERM) in the main thread only, and between its instructions. If the system has
# given the signal to another thread, a blocked main thread does not notice: so it looks up this often, in seconds.
LOOK_S = 0.25


def wait_heeding_signals(event: threading.Event) -> None:
    """Wait until `event` is set, and let signal handlers run meanwhile."""
    while not event.wait(LOOK_S):
        pass


def wait_until(
    changed: threading.Condition,
    ready: Callable[[], bool],
    describe: Callable[[], str],
    say: Callable[[str], None],
    first_word: float = FIRST_WORD_S,
) -> None:
    """Wait on `changed`, which the caller holds, until `ready()` is True.

    After `first_word` seconds, and then at doubling intervals, calls `say` with a sentence that contains `describe()`,
    unless that is "".
    """
    start, patience = time.monotonic(), first_word
    while not changed.wait_for(ready, timeout=min(LOOK_S, max(0.0, start + patience - time.monotonic()))):
        if time.monotonic() < start + patience:
            continue
        if what := describe():
            say(f"waiting for {what}, {time.monotonic() - start:.0f} s so far")
        patience *= 2
