"""Ends a child when its launcher is gone: the child holds a pipe from it, which breaks however the launcher died."""

from __future__ import annotations

import os
import sys
import threading

from rallypoint.launch.environment import LIFELINE


def hold_lifeline() -> None:
    """If the launcher gave this process a lifeline, exit at once when it breaks. Does nothing without one."""
    text = os.environ.pop(LIFELINE, "")
    if text.isdigit():
        threading.Thread(target=_watch, args=(int(text),), name="lifeline", daemon=True).start()


def _watch(fd: int) -> None:
    try:
        while os.read(fd, 1):
            continue
    except OSError:
        pass  # a broken pipe means the same as a closed one
    sys.stderr.flush()
    os._exit(113)
