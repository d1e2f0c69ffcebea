"""Trackers whose stores cannot take back a step: after a roll-back the steps that count are copied to a new run."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from rallypoint.watch.tracking.tracker import RunFacts

Row = tuple[int, "dict[str, float] | str"]  # a step with its figures, or with a sentence


class Store(Protocol):
    """Where a library keeps runs. It can add to a run, and hide one; it cannot take a step out of it."""

    def hide(self, name: str, step: int) -> None:
        """Let its user no longer see the runs of this name: from `step` on they are void, and the rest is copied."""

    def begin(self, run: RunFacts) -> None:
        """Begin a new run, to which everything goes from now on."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the figures of a step."""

    def event(self, step: int, text: str) -> None:
        """Add a sentence."""

    def flush(self) -> None:
        """Make durable what was added, as far as the library can."""

    def close(self) -> None:
        """End the run, if there is one."""


class Copying:
    """A `Tracker` for a `Store`: its user sees one run, with each step once.

    ``folder/NAME.rows.jsonl`` keeps what the run named NAME has, one row a line: ``[4, {"loss": 2.5}]``. `start` hides
    the run of before, cuts the rows from ``run.step`` on, and copies the others to a new run. It also does when nothing
    is void: what a killed process had given to the library may not have arrived.
    """

    def __init__(self, folder: Path, store: Store, clean: Callable[[str], str] = str) -> None:
        """`clean` takes out of the texts of events what others must not see."""
        self._folder, self._store, self._clean = folder, store, clean
        self._rows: io.TextIOWrapper | None = None

    def start(self, run: RunFacts) -> None:
        """See `Tracker`."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{run.name}.rows.jsonl"
        fresh = path.with_suffix(".new")
        kept = [] if run.step == 0 else _rows(path)
        with fresh.open("w", encoding="utf-8") as file:
            for step, what in kept:
                if step < run.step:
                    file.write(json.dumps([step, what]) + "\n")
        fresh.replace(path)
        self._store.hide(run.name, run.step)
        self._store.begin(run)
        for row in _rows(path):
            self._give(*row)
        self._rows = path.open("a", encoding="utf-8")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._add(step, dict(scalars))

    def event(self, step: int, text: str) -> None:
        """See `Tracker`."""
        self._add(step, self._clean(text))

    def flush(self) -> None:
        """See `Tracker`."""
        if self._rows is not None:
            self._store.flush()
            self._rows.flush()

    def close(self) -> None:
        """See `Tracker`."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None
            self._store.close()

    def _add(self, step: int, what: dict[str, float] | str) -> None:
        assert self._rows is not None, "start comes first"
        self._rows.write(json.dumps([step, what]) + "\n")
        self._give(step, what)

    def _give(self, step: int, what: dict[str, float] | str) -> None:
        if isinstance(what, str):
            self._store.event(step, what)
        else:
            self._store.log(step, what)


def _rows(path: Path) -> Iterator[Row]:
    """The rows in a file, by their order; none if there is no file. The last line of a killed process may be torn."""
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                step, what = json.loads(line)
                yield step, what
