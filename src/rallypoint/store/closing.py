"""The end of threads that use a store: a store that hangs must not keep a job from ending."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger("rallypoint")

PATIENCE_S = 10.0  # seconds that a store may still take when the job is over

Ending = tuple[threading.Thread, str]  # a thread that was told to end, and what it does


def end(*threads: Ending) -> None:
    """Wait for threads that were told to end, each given with what it does, for PATIENCE_S together.

    If the store does not answer a thread in time, logs what is given up. The threads must be daemons: they may then be
    left behind.
    """
    deadline = time.monotonic() + PATIENCE_S
    for thread, doing in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.warning("given up: %s. The job is over, and the store has not answered for %g s", doing, PATIENCE_S)
