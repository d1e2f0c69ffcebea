"""The event log of a run: one JSON object a line in ``events.jsonl``, to be looked at afterwards or while it runs."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("rallypoint")


class EventLog:
    """Appends events, each stamped with seconds since the log was opened; without a folder it keeps quiet.

    No job ends because its log cannot be written: it says so once, and ends there itself.
    """

    def __init__(self, folder: str) -> None:
        self._file = (Path(folder) / "events.jsonl").open("ab") if folder else None
        self._start = time.monotonic()

    def write(self, event: msgspec.Struct) -> None:
        """Append one message, its fields beside its type and the time."""
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
