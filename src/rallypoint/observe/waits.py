"""Nothing waits without a name (I8): a wait past a threshold says what it waits for, once, and again as it grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_WORD_S = 5.0


def wait_until(
    changed: threading.Condition,
    ready: Callable[[], bool],
    describe: Callable[[], str],
    say: Callable[[str], None],
    first_word: float = FIRST_WORD_S,
) -> None:
    """Wait on `changed` (held by the caller) until `ready()`; after `first_word` seconds, and then at doubling
    intervals, `say` what `describe` tells (nothing if that is "")."""
    start, patience = time.monotonic(), first_word
    while not changed.wait_for(ready, timeout=max(0.0, start + patience - time.monotonic())):
        if what := describe():
            say(f"waiting for {what}, {time.monotonic() - start:.0f} s so far")
        patience *= 2
