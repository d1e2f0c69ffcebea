"""Reads a run's ``events.jsonl``, while it grows too."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.core.protocol import Message
from rallypoint.errors import DataError, UsageError, to_resume
from rallypoint.own_files import was_left
from rallypoint.watch.state import RunState

EVENTS = "events.jsonl"
_PIECE_BYTES = 1 << 20
_LINE_BYTES = 16 << 20  # a longer line is none of ours
_LOOK_S = 0.25

Event = tuple[Message, float]
_BEGIN = re.compile(rb'\{"t":([0-9.]{1,24}),')  # what `EventLog` adds to a message
_FAILED = re.compile(r"the loss of replica \d+ at step (\d+) is (nan|inf|-inf)")
_messages = msgspec.json.Decoder(Message)


def check_log(folder: Path) -> None:
    """UsageError if there is no log in the folder."""
    if not (folder / EVENTS).is_file():
        raise UsageError(f"{folder} has no {EVENTS}: name the folder of a run, as runs/20260131-235959")


def event_of(line: bytes) -> Event | None:
    """One line of the log: the message, and the time (s). None if it is not a whole event: a torn line, or a kind that
    this version does not know."""
    begin = _BEGIN.match(line)
    if begin is None:
        return None
    try:
        t, rest = float(begin[1]), b"{" + line[begin.end() :]
        if not math.isfinite(t):
            return None
        return _message(rest), t
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        return None


def _message(line: bytes) -> Message:
    try:
        message: Message = _messages.decode(line)
    except msgspec.ValidationError:
        if b":null" not in line:
            raise
        fields = msgspec.json.decode(line)  # numbers that JSON cannot tell: they were nan or infinite
        for name in ("loss", "figures", "values"):
            fields |= {name: _nan(fields[name])} if name in fields else {}
        message = msgspec.convert(fields, Message)
    return message


def _nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nan(one) for name, one in value.items()}
    return math.nan if value is None else value


class Log:
    """The log in a run's folder. It may be replaced or cut (``--overwrite``).

    Attributes:
        generation: rises when the log has begun anew.
        read, size: how many bytes were read, and how many there are.
        file: the file's number on its disk; -1: there was none yet.
    """

    def __init__(self, folder: Path) -> None:
        self.generation, self.read, self.size, self.file = 0, 0, 0, -1
        self._path, self._rest = folder / EVENTS, b""

    def piece(self) -> list[Event] | None:
        """The events of the next piece of it; None if there is nothing new."""
        try:
            with self._path.open("rb") as file:
                about = self._path.stat()
                self.size = about.st_size
                if about.st_size < self.read or about.st_ino != self.file:
                    self.generation += self.file >= 0
                    self.read, self._rest, self.file = 0, b"", about.st_ino
                file.seek(self.read)
                piece = file.read(_PIECE_BYTES)
        except OSError:
            return None
        if not piece:
            return None
        self.read += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            self._rest = b""
        return [event for line in lines if (event := event_of(line)) is not None]


def recorded_losses(folder: Path) -> dict[int, float]:
    """Return the mean loss by step, the newest where a step was made again. A loss that ended the run is in it too.

    Raises DataError without a log.
    """
    found, log, run = dict[int, float](), Log(folder), RunState()
    if not (folder / EVENTS).is_file():
        raise DataError(f"the log {folder / EVENTS} cannot be read: there is none")
    while (events := log.piece()) is not None:
        for event in events:
            if not run.take(*event):
                continue
            if run.row is not None and "loss" in run.row[1]:
                found[run.row[0]] = run.row[1]["loss"]
            elif failed := _FAILED.search(run.why):
                found[int(failed[1])] = float(failed[2])
    return dict(sorted(found.items()))


class Follower:
    """Keeps `run` up to date with the log in `folder`, on a thread of its own.

    Hold `lock` to read `run`. If the log is replaced, `run` begins anew. Raises UsageError if there is none.
    """

    def __init__(self, folder: Path) -> None:
        check_log(folder)
        self._folder, self.run, self.lock, self.log = folder, RunState(), threading.Lock(), Log(folder)
        self.generation = 0  # rises when `run` has begun anew
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self, closing: Callable[[], bool] = lambda: False) -> None:
        """Read what is new, a piece at a time."""
        while not closing() and (events := self.log.piece()) is not None:
            with self.lock:
                if self.generation != self.log.generation:
                    self.run, self.generation = RunState(), self.log.generation
                for event in events:
                    self.run.take(*event)
        if self.run.plan is not None and not self.run.ended and was_left(self._folder):
            with self.lock:
                way = f": {to_resume(self._folder)}" if self.run.stored else ""
                self.run.left(f"nothing of it runs any more{way}")

    def _follow(self) -> None:
        while not self._closing.is_set():
            self.look(self._closing.is_set)
            self._closing.wait(_LOOK_S)
