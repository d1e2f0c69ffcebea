"""Follows a run's log for a tracker, in a process of its own, and remembers how far it has come."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rallypoint.errors import UsageError
from rallypoint.watch.follow import EVENTS, event_of
from rallypoint.watch.tracking.tracker import RunFacts, Tracker
from rallypoint.watch.tracking.tracking import Position, Tracking

_PIECE_BYTES = 1 << 20
_LOOK_S, _FLUSH_S = 0.25, 2.0


def place_of(folder: Path, kind: str, target: str) -> Path:
    """The file in a run's folder that says how far a tracker of this kind has come with this target."""
    return folder / f"tracked-{kind}-{hashlib.sha256(target.encode()).hexdigest()[:8]}.json"


def track(
    folder: Path, facts: RunFacts, tracker: Tracker, place: Path, closing: threading.Event, goes_on: Callable[[], bool]
) -> int:  # fmt: skip
    """Give the run's events to the tracker while the run `goes_on` and `closing` is not set; then what is left.

    It goes on where an earlier call has ended, by the position in the file `place`. Returns the next step. Raises
    UsageError if there is no log, and what the tracker raises.
    """
    path = folder / EVENTS
    try:
        file = path.open("rb")
    except OSError:
        raise UsageError(f"{folder} has no {EVENTS}: name the folder of a run, as runs/20260131-235959") from None
    with file:
        about = os.fstat(file.fileno())
        at = _position(place)
        if at.file != about.st_ino or at.offset > about.st_size:
            at = Position(about.st_ino)  # another run's
        tracking = Tracking(tracker, facts, at)
        offset, saved, now = at.offset, -1, time.monotonic

        def save() -> None:
            nonlocal saved, saved_at
            tracker.flush()
            known = Position(at.file, offset, tracking.step, tracking.evaluated, tracking.values)
            _write(place, msgspec.json.encode(known))
            saved, saved_at = offset, now()

        saved_at = now()
        last = False
        while True:
            offset = _pieces(file.fileno(), offset, tracking, lambda: not last and now() - saved_at > _FLUSH_S)
            if offset != saved and (last or now() - saved_at > _FLUSH_S):
                save()
            if last and offset == saved:
                break
            whole = offset == _whole(file.fileno(), offset)
            last = last or closing.is_set() or (whole and not goes_on())
            if not last and whole:
                closing.wait(_LOOK_S)
    return tracking.step


def _pieces(fd: int, offset: int, tracking: Tracking, enough: Callable[[], bool]) -> int:
    """Give all whole lines from `offset` on. Returns where the next one begins."""
    rest = b""
    start = offset
    while piece := os.pread(fd, _PIECE_BYTES, start + len(rest)):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if (event := event_of(line)) is not None:
                tracking.take(event[0])
            start += len(line) + 1
        if enough():
            break
    return start


def _whole(fd: int, offset: int) -> int:
    """`offset`, unless a whole line follows."""
    return offset + 1 if b"\n" in os.pread(fd, _PIECE_BYTES, offset) else offset


def _position(place: Path) -> Position:
    try:
        return msgspec.json.decode(place.read_bytes(), type=Position)
    except (OSError, msgspec.DecodeError):
        return Position()


def _write(place: Path, data: bytes) -> None:
    fresh = place.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
    fresh.replace(place)
