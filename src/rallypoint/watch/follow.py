"""Reads a run's ``events.jsonl``, while it grows too."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from rallypoint.net.messages import Message
from rallypoint.watch.state import RunState

EVENTS = "events.jsonl"
_PIECE_BYTES = 1 << 20
_LINE_BYTES = 16 << 20  # a longer line is none of ours
_LOOK_S = 0.25


_BEGIN = re.compile(rb'\{"t":([0-9.]{1,24}),')  # what `EventLog` adds to a message
_messages = msgspec.json.Decoder(Message)


def event_of(line: bytes) -> tuple[Message, float] | None:
    """One line of the log: the message, and the time (s). None if it is not a whole event: a torn line, or a kind that
    this version does not know."""
    begin = _BEGIN.match(line)
    if begin is None:
        return None
    try:
        return _messages.decode(b"{" + line[begin.end() :]), float(begin[1])
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return None


def take_line(run: RunState, line: bytes) -> bool:
    """Give one line of the log to `run`. Returns False if it is not a whole event; see `event_of`."""
    event = event_of(line)
    if event is None:
        return False
    try:
        run.take(*event)
    except ValueError:
        return False
    return True


class Follower:
    """Keeps `run` up to date with the log in `folder`, on a thread of its own.

    Hold `lock` to read `run`. The file may be replaced or cut (``--overwrite``): then `run` begins anew.
    """

    def __init__(self, folder: Path) -> None:
        self.run, self.lock = RunState(), threading.Lock()
        self.generation = 0  # rises when `run` has begun anew
        self.read, self.size = 0, 0  # bytes of the log
        self._path, self._rest = folder / EVENTS, b""
        self._file = -1  # the file's number on its disk
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self, closing: Callable[[], bool] = lambda: False) -> None:
        """Read what is new, a piece at a time."""
        while not closing() and (piece := self._piece()):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > _LINE_BYTES:
                self._rest = b""
            with self.lock:
                for line in lines:
                    if line:
                        take_line(self.run, line)

    def _piece(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                about = self._path.stat()
                self.size = about.st_size
                if about.st_size < self.read or about.st_ino != self._file:
                    self._anew(about.st_ino)
                file.seek(self.read)
                piece = file.read(_PIECE_BYTES)
        except OSError:
            return b""
        self.read += len(piece)
        return piece

    def _anew(self, file: int) -> None:
        with self.lock:
            if self._file >= 0:
                self.run, self.generation = RunState(), self.generation + 1
            self.read, self._rest, self._file = 0, b"", file

    def _follow(self) -> None:
        while not self._closing.is_set():
            self.look(self._closing.is_set)
            self._closing.wait(_LOOK_S)
