"""The event log of a run: ``events.jsonl`` with one JSON object per line. It can be read while the job runs."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("rallypoint")

_AGAIN_S = 1.0


class EventLog:
    """Appends events to `folder`/events.jsonl, each with the seconds since the log was opened.

    With `folder=""` it writes nothing.

    Only its owner may read the file. While it cannot be written (a full disk), events are dropped: one warning is
    logged, and another with their number when it can be written again. It is tried once a second.
    """

    def __init__(self, folder: str) -> None:
        self._path, self._descriptor = Path(folder) / "events.jsonl", -1
        if folder:
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                with contextlib.suppress(OSError):  # another user's
                    os.fchmod(self._descriptor, 0o600)
        self._start = time.monotonic()
        self._dropped, self._again_at = 0, 0.0
        self._torn = False  # the last line is not complete

    def write(self, event: msgspec.Struct) -> None:
        """Append one message: its fields, its type, and the time `t` in seconds."""
        if self._descriptor < 0:
            return
        now = time.monotonic()
        if now < self._again_at:
            self._dropped += 1
            return
        fields: dict[str, Any] = {"t": round(now - self._start, 4), **msgspec.to_builtins(event)}
        try:
            self._append(b"\n" * self._torn + msgspec.json.encode(fields) + b"\n")
        except OSError as error:
            if not self._dropped:
                log.warning("%s cannot be written, the job goes on: %s", self._path, error.strerror or error)
            self._dropped, self._again_at = self._dropped + 1, now + _AGAIN_S
            return
        if self._dropped:
            log.warning("%s is written again: %d events are missing", self._path, self._dropped)
            self._dropped = 0

    def _append(self, line: bytes) -> None:
        written = os.write(self._descriptor, line)
        while written < len(line):
            self._torn = True
            written += os.write(self._descriptor, line[written:])
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
