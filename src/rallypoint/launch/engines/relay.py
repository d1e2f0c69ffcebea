"""Lines that processes print: cut out of what their pipes give, and on their way from the threads that read them to the
one that shows them: bounded, and nobody's end."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("rallypoint")

LONGEST = 1 << 20  # bytes of a line; a longer one comes in pieces, because nobody knows whether it ever ends
MOST = 1 << 20  # characters that wait; a line is never split, so one more of the longest may


class Relay:
    """Lines of all processes, in the order in which they came. Any thread may `put`; one thread takes.

    While too much waits, who puts waits too. So a process that prints faster than its lines can be shown is held up by
    its pipe, as it would be by a terminal, and no line is lost. What is put `first` waits for no room, and is taken
    before the lines that wait.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._lines: deque[tuple[str, str]] = deque()
        self._first: deque[tuple[str, str]] = deque()
        self._size, self._open = 0, False

    def __len__(self) -> int:
        """How many lines wait."""
        return len(self._first) + len(self._lines)

    def put(self, process: str, line: str, *, first: bool = False) -> None:
        """Add a line that `process` has printed, once there is room; `first`: at once."""
        with self._changed:
            self._changed.wait_for(lambda: first or self._open or self._size < self._most)
            (self._first if first else self._lines).append((process, line))
            self._size += len(line) + 1

    def take(self) -> tuple[str, str]:
        """Take the next line: the process, and what it has printed. IndexError if none waits."""
        with self._changed:
            process, line = (self._first or self._lines).popleft()
            self._size -= len(line) + 1
            self._changed.notify_all()
            return process, line

    def open(self) -> None:
        """From now on nobody waits: the processes are about to be killed, and nobody may take any more."""
        with self._changed:
            self._open = True
            self._changed.notify_all()


def passed_on(process: str, output: Callable[[str], None]) -> Callable[[str], None]:
    """Return `output`, but raising nothing: who reads the lines of `process` has to read on, else it could not print.

    The first error is logged; lines that cannot be passed on are dropped.
    """
    failed = False

    def pass_on(line: str) -> None:
        nonlocal failed
        try:
            output(line)
        except Exception as error:  # of whatever kind: it is the error of whoever shows lines
            if not failed:
                failed = True
                log.error("lines of %s cannot be passed on: %r", process, error)

    return pass_on


class Lines:
    """The lines of one process, each as a terminal shows it in the end: a ``\\r`` begins the line anew.

    So a progress bar, which may be written a million times without a newline, takes no more memory than one of its
    states.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take the next bytes. Returns the lines that are complete now, without their ends."""
        *whole, rest = (self._rest + data).split(b"\n")
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        pieces = [rest[at : at + LONGEST] for at in range(0, len(rest), LONGEST)] or [b""]
        self._rest = pieces.pop()
        return [_shown(line) for line in (*whole, *pieces)]

    def rest(self) -> list[str]:
        """Nothing more comes. Returns the last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return [_shown(rest)] if rest else []


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
