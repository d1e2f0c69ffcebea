"""Follows a run's log for a tracker, in a process of its own, and remembers how far it has come."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rallypoint.errors import UsageError
from rallypoint.own_files import opened, read_file
from rallypoint.watch.follow import EVENTS, event_of
from rallypoint.watch.tracking.tracker import RunFacts, Tracker
from rallypoint.watch.tracking.tracking import Position, Tracking

_PIECE_BYTES = 1 << 20
_LINE_BYTES = 16 << 20
_LOOK_S, _FLUSH_S = 0.25, 2.0
PREDECESSOR_S = 5.0  # so long another process that follows the same log, for the same target, may take to end


def place_of(folder: Path, kind: str, target: str) -> Path:
    """The file in a run's folder that says how far a tracker of this kind has come with this target."""
    return folder / f"tracked-{kind}-{hashlib.sha256(target.encode()).hexdigest()[:8]}.json"


def track(
    folder: Path, facts: RunFacts, tracker: Tracker, place: Path, closing: threading.Event, goes_on: Callable[[], bool]
) -> int:  # fmt: skip
    """Give the run's events to the tracker while the run `goes_on` and `closing` is not set; then what is left.

    It goes on where an earlier call has ended, by the position in the file `place`. Returns the next step. Raises
    UsageError if there is no log, or another process does the same now, and what the tracker raises.
    """
    path = folder / EVENTS
    try:
        file = path.open("rb")
    except OSError:
        raise UsageError(f"{folder} has no {EVENTS}: name the folder of a run, as runs/20260131-235959") from None
    with file, _alone(place):
        about = os.fstat(file.fileno())
        at = _position(place)
        if at.file != about.st_ino or at.offset > about.st_size:
            at = Position(about.st_ino)  # another run's
        given = _Given(file.fileno(), at, Tracking(tracker, facts, at), tracker, place)
        while True:
            last = closing.is_set() or not goes_on()  # then what is written by now is all
            while given.piece():
                given.save_if_due()
            if last:
                given.save()
                return given.tracking.step
            given.save_if_due()
            closing.wait(_LOOK_S)


@dataclass(slots=True)
class _Given:
    """What of a log was given to a tracker."""

    fd: int
    at: Position
    tracking: Tracking
    tracker: Tracker
    place: Path
    saved_at: float = field(default_factory=time.monotonic)
    _offset: int = -1
    _rest: bytes = b""  # the beginning of the next line

    def piece(self) -> bool:
        """Give the whole lines of the next piece. False if there is none."""
        if self._offset < 0:
            self._offset = self.at.offset
        piece = os.pread(self.fd, _PIECE_BYTES, self._offset + len(self._rest))
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if (event := event_of(line)) is not None:
                self.tracking.take(event[0])
            self._offset += len(line) + 1
        if len(self._rest) > _LINE_BYTES:  # none of ours
            self._offset, self._rest = self._offset + len(self._rest), b""
        return bool(piece)

    def save_if_due(self) -> None:
        """Save, if the last time was long enough ago."""
        if time.monotonic() - self.saved_at > _FLUSH_S:
            self.save()

    def save(self) -> None:
        """Let the tracker make durable what it has, and then note how far that is."""
        self.saved_at = time.monotonic()
        if self._offset == self.at.offset:
            return
        self.tracker.flush()
        known = self.tracking
        self.at = Position(self.at.file, self._offset, known.step, known.evaluated, known.values)
        _write(self.place, msgspec.json.encode(self.at))


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """In the body no other process writes the same: each step would be there twice. UsageError if one does not end."""
    with opened(place.parent) as folder:
        lock = folder.lock_file(place.with_suffix(".lock").name)
    try:
        deadline = time.monotonic() + PREDECESSOR_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"another process writes {place.parent} for the same tracker already, as `rallypoint run "
                        "--tensorboard` and `--track` do: there is nothing left to do"
                    ) from None
                time.sleep(_LOOK_S)
                continue
            except OSError:  # a file system without locks
                pass
            break
        yield
    finally:
        os.close(lock)


def _position(place: Path) -> Position:
    try:
        return msgspec.json.decode(read_file(place), type=Position)
    except (OSError, msgspec.DecodeError):
        return Position()


def _write(place: Path, data: bytes) -> None:
    with opened(place.parent) as folder:
        folder.write(place.name, data)
