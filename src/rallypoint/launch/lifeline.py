"""Ends a child when its launcher is gone: the child holds a pipe from it, which breaks however the launcher died."""

from __future__ import annotations

import os
import threading

from rallypoint.launch.environment import LIFELINE
from rallypoint.observe.lenient import flush_output

LIFELINE_THREAD = "lifeline"  # it lives as long as the process, and runs nothing but a blocking read


def hold_lifeline() -> bool:
    """If the launcher gave this process a lifeline, exit at once when it breaks. Returns False without one."""
    text = os.environ.pop(LIFELINE, "")
    if not text.isdigit():
        return False
    threading.Thread(target=_watch, args=(int(text),), name=LIFELINE_THREAD, daemon=True).start()
    return True


def _watch(fd: int) -> None:
    try:
        while os.read(fd, 1):
            continue
    except OSError:
        pass  # a broken pipe means the same as a closed one
    flush_output()
    os._exit(113)
