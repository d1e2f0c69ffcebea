"""The console of a process that runs a job: what cannot be printed ends nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, TextIO, cast

from rich.console import Console

from rallypoint.observe.lenient import Lenient
from rallypoint.observe.unhurried import Unhurried

_HURRIED_S = 2.0  # seconds for the last lines of a run that was interrupted


class OutputClosed(Exception):
    """Nobody reads our output any more."""


class Screen(Console):
    """A rich console that becomes silent when its reader is gone (``rallypoint run ... | head``).

    What it cannot print otherwise (a full disk, a character that the stream cannot encode) is left out: see `Lenient`.
    """

    closed = False
    hurried = False  # at the end of `unhurried`: do not wait long for the reader

    @property
    def file(self) -> IO[str]:
        """Where it prints."""
        return cast(IO[str], Lenient(cast(TextIO, Console.file.fget(self))))  # type: ignore[attr-defined]

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """In the body, printing does not wait for the reader; what was not read by then is waited for at the end."""
        if not _has_descriptor(self.file):
            yield
            return
        before, output = self._file, Unhurried(cast(TextIO, self.file))
        self._file = cast(IO[str], output)
        try:
            yield
        finally:
            output.end(_HURRIED_S if self.hurried else None)
            self._file = before

    def on_broken_pipe(self) -> None:
        """Print nothing any more. The default would end the thread that has just printed."""
        self.quiet = self.closed = True
        with open(os.devnull, "w") as nowhere:  # also for what the interpreter flushes when it exits
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _has_descriptor(file: IO[str]) -> bool:
    try:
        return file.fileno() >= 0
    except (OSError, ValueError):  # (io.UnsupportedOperation is both)
        return False
