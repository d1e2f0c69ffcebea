"""Output that ends nobody's work: what cannot be printed is left out."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TextIO


class Lenient:
    """The stream `file`, but `write` and `flush` raise nothing except BrokenPipeError: nobody reads it.

    A character that the stream cannot encode becomes ``?``. A line that finds no room (the disk is full, the terminal
    is gone) is left out; the next one is tried again.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write what the stream takes of this. Returns the length of `text`."""
        with _left_out():
            try:
                self._file.write(text)
            except UnicodeEncodeError:
                encoding = self._file.encoding or "ascii"
                self._file.write(text.encode(encoding, errors="replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Let the stream pass on what it has."""
        with _left_out():
            self._file.flush()


@contextlib.contextmanager
def _left_out() -> Any:
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError):  # ValueError: it was closed
        pass


def say(text: str, *, error: bool = False) -> None:
    """Print a line at once to standard output, or (`error`) to standard error. Raises nothing."""
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # a process without one
        return
    with contextlib.suppress(BrokenPipeError):
        lenient = Lenient(stream)
        lenient.write(f"{text}\n")
        lenient.flush()


def flush_output() -> None:
    """Flush standard output and standard error before the process ends. Raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def encode_all() -> None:
    """Let this process's standard output take any text: what it cannot encode becomes ``?``."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
