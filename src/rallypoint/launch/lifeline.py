"""A child holds a pipe from its launcher: when the launcher is gone, however it died, the child goes too."""

from __future__ import annotations

import os
import sys
import threading

from rallypoint.launch.environment import LIFELINE


def hold_lifeline() -> None:
    """If the launcher gave this process a lifeline, leave at once when it breaks. Safe without one."""
    text = os.environ.pop(LIFELINE, "")
    if text.isdigit():
        threading.Thread(target=_watch, args=(int(text),), name="lifeline", daemon=True).start()


def _watch(fd: int) -> None:
    try:
        while os.read(fd, 1):
            continue
    except OSError:
        pass  # a broken pipe says the same as a closed one
    sys.stderr.flush()
    os._exit(113)
