"""The event log of a run: ``events.jsonl`` with one JSON object per line. It can be read while the job runs."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.store.files import EndingThread

log = logging.getLogger("rallypoint")

_AGAIN_S = 1.0
_MOST_WAITING = 10_000  # events that wait for a disk that hangs


def line_of(event: msgspec.Struct, t: float) -> bytes:
    """A message as a line of the log: the time `t` (s), its type, its fields."""
    fields: dict[str, Any] = {"t": round(t, 4), **msgspec.to_builtins(event)}
    return msgspec.json.encode(fields) + b"\n"


class EventLog:
    """Appends events to `folder`/events.jsonl, each with the seconds since the log was opened.

    With `folder=""` it writes nothing. A thread of its own writes, so that a disk that hangs delays nobody.

    Only its owner may read the file. While it cannot be written (a full disk, or one that hangs), events are dropped:
    one warning is logged, and another with their number when it can be written again. A full disk is tried once a
    second.
    """

    def __init__(self, folder: str) -> None:
        self._path, self._descriptor = Path(folder) / "events.jsonl", -1
        self._torn = False  # the last line is not complete
        if folder:
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            if stat.S_ISREG((about := os.fstat(self._descriptor)).st_mode):
                with contextlib.suppress(OSError), self._path.open("rb") as file:  # another user's
                    self._torn = os.pread(file.fileno(), 1, max(0, about.st_size - 1)) not in (b"", b"\n")
                    os.fchmod(self._descriptor, 0o600)
        self._start = time.monotonic()
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._lock = threading.Lock()  # for `_dropped`
        self._dropped, self._again_at = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="event log", daemon=True)

    def write(self, event: msgspec.Struct) -> None:
        """Append one message: its fields, its type, and the time `t` in seconds. Only one thread may call it."""
        if self._descriptor < 0:
            return
        line = line_of(event, time.monotonic() - self._start)
        if self._lines.qsize() >= _MOST_WAITING:
            self._drop("its disk does not answer")
            return
        if self._thread.ident is None:
            self._thread.start()
        self._lines.put(line)

    def stop(self) -> EndingThread:
        """Let the thread write what waits, close the file and end. Return it, to be waited for."""
        if self._thread.ident is None:
            self._thread.start()
        self._lines.put(None)
        return self._thread, f"the event log {self._path}"

    # ---- on the log's thread ----

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._append(line)
            self._lines.task_done()
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: bytes) -> None:
        now = time.monotonic()
        if now < self._again_at:
            self._drop()
            return
        try:
            self._write_all(b"\n" * self._torn + line)
        except OSError as error:
            self._drop(error.strerror or str(error))
            self._again_at = now + _AGAIN_S
            return
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning("%s is written again: %d events are missing", self._path, dropped)

    def _write_all(self, line: bytes) -> None:
        written = os.write(self._descriptor, line)
        while written < len(line):
            self._torn = True
            written += os.write(self._descriptor, line[written:])
        self._torn = False

    def _drop(self, why: str = "") -> None:
        """Count one event that is not written; say why, if it is the first."""
        with self._lock:
            self._dropped += 1
            first = self._dropped == 1
        if first:
            log.warning("%s cannot be written, the job goes on: %s", self._path, why)
