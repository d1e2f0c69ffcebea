"""The lines that a run's processes have printed, kept in its folder: the last megabyte or two."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from rallypoint.launch.folder import CONSOLE, CONSOLE_BEFORE
from rallypoint.launch.reporting.redaction import Redaction

MOST_BYTES = 1 << 20  # then the file becomes the one before, and that one goes
_LONGEST = 2000
_MOST_WAITING = 10_000  # lines that wait for a disk that hangs
_END_S = 1.0


class KeptLines:
    """Appends lines to ``console.log`` in `folder`, with the time of day; only its owner may read it.

    Secrets among `known` are not written, nor what looks like one: see `Redaction`. A thread of its own writes: a disk
    that hangs delays nobody. What cannot be written is dropped.
    """

    def __init__(self, folder: Path, known: Iterable[str] = (), most: int = MOST_BYTES) -> None:
        self._folder, self._most, self._redact = folder, most, Redaction(known)
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="console log", daemon=True)

    def add(self, process: str, line: str) -> None:
        """Keep a line that a process has printed. Only one thread may call it."""
        if self._thread.ident is None:
            self._thread.start()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(f"{time.strftime('%H:%M:%S')} {process[:100]} | {line[: 2 * _LONGEST]}")

    def close(self) -> None:
        """Write what waits. May be called more than once."""
        if self._thread.ident is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(None)
            self._thread.join(_END_S)

    def _run(self) -> None:
        file: BinaryIO | None = None
        while (line := self._lines.get()) is not None:
            try:
                if file is None:
                    file = _opened(self._folder / CONSOLE)
                shown = self._redact(line)[:_LONGEST]  # cut before, a secret's first half would stand at the end
                file.write(f"{shown}\n".encode(errors="replace"))
                if self._lines.empty():
                    file.flush()
                if file.tell() > self._most:
                    file.close()
                    file = None
                    (self._folder / CONSOLE).replace(self._folder / CONSOLE_BEFORE)
            except OSError:  # a full disk, a folder that is gone
                file = None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _opened(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "ab")
