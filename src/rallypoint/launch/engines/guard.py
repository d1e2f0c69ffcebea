"""Ends process groups when whoever supervises them is gone: ``python guard.py [FOLDER]``, with a pipe as its input.

A line ``+7`` from the pipe is a group to end then; after ``-7`` it is not any more. When the pipe breaks, which it does
however the supervisor died, the groups get SIGKILL, FOLDER is deleted, and the guard exits.

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


class Guard:
    """The supervisor's side: a guard that runs until `close`, or until this process is gone. Any thread may call it.

    The guard is no child of this process, because Ray ends an actor's children with the actor.
    """

    def __init__(self, folder: str = "") -> None:
        argv = [sys.executable, "-I", "-S", __file__, *([folder] if folder else [])]
        first = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            cwd="/",
        )  # fmt: skip
        first.wait()  # it has forked the guard itself
        assert first.stdin is not None
        self._pipe = first.stdin

    def watch(self, group: int) -> None:
        """End this group if this process goes."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group has ended: another one may get its number."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard, and the groups that it still watches."""
        self._pipe.close()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was killed, or closed
            os.write(self._pipe.fileno(), line.encode())


def watch(lines: IO[str], folders: Sequence[str]) -> None:
    """Do what the module says, until the pipe breaks."""
    groups: set[int] = set()
    for line in lines:
        groups.add(int(line[1:])) if line[0] == "+" else groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__" and os.fork() == 0:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.stdin, sys.argv[1:])
