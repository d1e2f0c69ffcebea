"""Output that ends nobody's work, and holds nobody up."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections import deque
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


def open_standard_streams() -> None:
    """Open what the process was started without (``<&-``): else a pipe gets its number, and is lost in children."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: `number`, if nobody has taken it
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r"))


def encode_all() -> None:
    """Let this process's standard output take any text: what it cannot encode becomes ``?``."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


_GONE = (errno.EPIPE, errno.EBADF)  # other errors may pass: a full disk has room again
MOST = 8 << 20  # characters that wait for the reader; what comes then is left out, with a sentence


class Unhurried(io.TextIOBase):
    """Writes to the descriptor of `file`. When its reader is gone, `write` raises BrokenPipeError.

    A terminal that was stopped (Ctrl-S), or a pager that nobody scrolls, would otherwise hold up whoever prints. Text
    that finds no room, on a full disk, is left out, and so is what a terminal does not take that is gone.
    """

    def __init__(self, file: TextIO, most: int = MOST) -> None:
        file.flush()  # what comes after that goes past its buffer
        self._file, self._most = file, most
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._size = self._left_out = 0  # characters that wait; lines for which there was no room
        self._broken = self._ending = False
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._file.encoding

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        """Let the thread write this; leave it out if too much is waiting. Raises BrokenPipeError: nobody reads it."""
        with self._changed:
            if self._broken:
                raise BrokenPipeError("nobody reads the output")
            if self._size + len(text) > self._most:
                self._left_out += text.count("\n")
                return len(text)
            self._tell_of_what_is_missing()
            self._append(text)
        return len(text)

    def end(self, patience: float | None) -> bool:
        """Wait until all is written, not longer than `patience` seconds. Returns False if something is left."""
        with self._changed:
            self._tell_of_what_is_missing()
            self._ending = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._broken or not self._size, patience)

    def _tell_of_what_is_missing(self) -> None:
        if self._left_out:
            self._append(f"({self._left_out} lines were left out here: nobody read the output, or there was no room)\n")
            self._left_out = 0

    def _append(self, text: str) -> None:
        self._waiting.append(text)
        self._size += len(text)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while (text := self._next()) is not None:
            data = memoryview(text.encode(self._file.encoding, errors="replace"))
            try:
                while data:
                    data = data[self._write(data) :]
            except (OSError, ValueError) as error:
                with self._changed:
                    if isinstance(error, ValueError) or error.errno in _GONE:
                        self._broken = True
                        self._changed.notify_all()
                        return
                    self._left_out += text.count("\n")
            with self._changed:
                self._size -= len(text)
                self._changed.notify_all()

    def _write(self, data: memoryview) -> int:
        """Write some of it, once there is room; return how much. The descriptor may not wait itself."""
        fd = self._file.fileno()
        while True:
            try:
                return os.write(fd, data)
            except BlockingIOError:  # whoever shares a terminal or a pipe with us may have set it so (ssh, node)
                room = select.poll()  # (select takes no descriptor above 1023)
                room.register(fd, select.POLLOUT)
                room.poll()

    def _next(self) -> str | None:
        """Return what is to be written next; it counts as waiting until it is. None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else None
