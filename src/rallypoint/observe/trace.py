"""Records spans of a few steps as a Chrome trace (open it in Perfetto): which thread did what, and when.

All processes of a machine use the same monotonic clock, so their traces can be merged.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from rallypoint.observe.lenient import say
from rallypoint.own_files import opened

_LIMIT = 200_000  # spans kept by one process


class _Span:
    __slots__ = ("_args", "_name", "_start", "_tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self._tracer, self._name, self._args = tracer, name, args

    def __enter__(self) -> None:
        self._start = time.monotonic_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._tracer.ended(self._name, self._start, time.monotonic_ns(), self._args)


_NOTHING = nullcontext()


LOAD = "load"  # the span in which a script waits for data


class Tracer:
    """Collects the spans of one process while `on` is True. While it is False, a span costs two look-ups.

    It may also count the spans of some names, all the time: `count`.
    """

    def __init__(self, process: str) -> None:
        self.process = process
        self.on = False
        self._spans: list[dict[str, Any]] = []
        self._counted: dict[str, tuple[int, int]] = {}  # how many, and their nanoseconds
        self._lock = threading.Lock()  # for the values of `_counted`

    def count(self, *names: str) -> None:
        """From now on, count the spans of these names, and their seconds: see `phases`."""
        self._counted = dict.fromkeys(names, (0, 0))

    def counting(self, name: str) -> Tracer:
        """Count the spans of this name too; returns itself."""
        self._counted.setdefault(name, (0, 0))
        return self

    @property
    def phases(self) -> dict[str, tuple[int, float]]:
        """For each name that is counted: how many of its spans have ended, and their seconds."""
        return {name: (count, nanoseconds / 1e9) for name, (count, nanoseconds) in self._counted.items()}

    def seconds(self, name: str) -> float:
        return self._counted[name][1] / 1e9

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record the time inside ``with``. The viewer shows `args` with the span. Any thread may call it."""
        return _Span(self, name, args) if self.on or name in self._counted else _NOTHING

    def ended(self, name: str, start_ns: int, stop_ns: int, args: dict[str, Any]) -> None:
        """A span has ended: count it, and record it, as far as this is wanted."""
        if name in self._counted:
            with self._lock:
                count, nanoseconds = self._counted[name]
                self._counted[name] = count + 1, nanoseconds + stop_ns - start_ns
        if self.on:
            self.add(name, start_ns, stop_ns, args)

    def add(self, name: str, start_ns: int, stop_ns: int, args: dict[str, Any]) -> None:
        """Record a span that was already measured, in nanoseconds of time.monotonic_ns()."""
        if len(self._spans) < _LIMIT:
            event = {"name": name, "ph": "X", "ts": start_ns / 1e3, "dur": (stop_ns - start_ns) / 1e3, "args": args}
            self._spans.append({**event, "pid": self.process, "tid": threading.current_thread().name})

    def save(self, folder: Path) -> None:
        """Write ``trace-PROCESS.json`` if any span was recorded. The file appears complete or not at all.

        If the folder cannot be written (full, read-only), prints that to stderr and returns.
        """
        if not self._spans:
            return
        target = folder / f"trace-{self.process}.json"
        partial = target.with_suffix(f".{os.getpid()}.partial").name
        try:
            with opened(folder) as own:
                own.write(target.name, json.dumps({"traceEvents": self._spans}).encode(), mode=0o666, beside=partial)
        except OSError as error:
            why = error.strerror or error
            say(f"the trace of {self.process} cannot be written to {target}: {why}", error=True)


def merge(parts: Iterable[Path], into: Path) -> int:
    """Merge the processes' files into one. Returns the number of spans. Names become numbers, as viewers need."""
    events: list[dict[str, Any]] = []
    for part in sorted(parts):
        events.extend(json.loads(part.read_text())["traceEvents"])
    numbers: dict[tuple[str, str], int] = {}
    labels: list[dict[str, Any]] = []
    start = min((event["ts"] for event in events), default=0.0)
    for event in events:
        process, thread = event["pid"], event["tid"]
        event["pid"] = _number(numbers, labels, "process_name", process, "")
        event["tid"] = _number(numbers, labels, "thread_name", process, thread)
        event["ts"] -= start
    into.write_text(json.dumps({"traceEvents": labels + events, "displayTimeUnit": "ms"}))
    return len(events)


def _number(
    numbers: dict[tuple[str, str], int], labels: list[dict[str, Any]], what: str, process: str, thread: str
) -> int:
    key = (process, thread)
    if key not in numbers:
        numbers[key] = len(numbers) + 1
        name, pid = {"name": thread or process}, numbers[(process, "")]
        labels.append({"name": what, "ph": "M", "pid": pid, "tid": numbers[key], "args": name})
    return numbers[key]
