"""Ends a process group when whoever supervises it is gone: ``python guard.py [FOLDER]``, with a pipe as standard input.

Each line from the pipe is the group to end from now on; 0 for none. When the pipe breaks, which it does however the
supervisor died, the group gets SIGKILL, FOLDER is deleted, and the guard exits.

This file is run by path and imports only the standard library, so it starts at once and needs little memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO


def start_guard(folder: str = "") -> IO[bytes]:
    """Start a guard. Returns the pipe to it: keep it open as long as the group may live.

    The guard is no child of this process, because Ray ends an actor's children with the actor.
    """
    argv = [sys.executable, "-I", "-S", __file__, *([folder] if folder else [])]
    guard = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        cwd="/",
    )  # fmt: skip
    guard.wait()  # the one that we started has forked the guard itself
    assert guard.stdin is not None
    return guard.stdin


def watch(lines: IO[str], folders: Sequence[str]) -> None:
    """Do what the module says, until the pipe breaks."""
    group = 0
    for line in lines:
        group = int(line)
    if group > 0:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__" and os.fork() == 0:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.stdin, sys.argv[1:])
