"""The event log of a run: one JSON object a line in ``events.jsonl``, to be looked at afterwards or while it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec


class EventLog:
    """Appends events, each stamped with seconds since the log was opened; without a folder it keeps quiet."""

    def __init__(self, folder: str) -> None:
        self._file = (Path(folder) / "events.jsonl").open("ab") if folder else None
        self._start = time.monotonic()

    def write(self, event: msgspec.Struct) -> None:
        """Append one message, its fields beside its type and the time."""
        if self._file is not None:
            fields: dict[str, Any] = {"t": round(time.monotonic() - self._start, 4), **msgspec.to_builtins(event)}
            self._file.write(msgspec.json.encode(fields) + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
