"""The event log of a run: ``events.jsonl`` with one JSON object per line. It can be read while the job runs."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("rallypoint")


class EventLog:
    """Appends events to `folder`/events.jsonl, each with the seconds since the log was opened.

    With `folder=""` it writes nothing.

    If the file cannot be written (a full disk), it logs one warning and writes no more; the job goes on.
    """

    def __init__(self, folder: str) -> None:
        self._file = (Path(folder) / "events.jsonl").open("ab") if folder else None
        self._start = time.monotonic()

    def write(self, event: msgspec.Struct) -> None:
        """Append one message: its fields, its type, and the time `t` in seconds."""
        if self._file is not None:
            fields: dict[str, Any] = {"t": round(time.monotonic() - self._start, 4), **msgspec.to_builtins(event)}
            try:
                self._file.write(msgspec.json.encode(fields) + b"\n")
                self._file.flush()
            except OSError as error:
                log.warning("%s ends here, the job goes on: %s", self._file.name, error.strerror or error)
                self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
