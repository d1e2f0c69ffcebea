"""Gives a run's figures to a tracker (TensorBoard and its like), from the run's log, in a process of its own."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from rallypoint.errors import UsageError, to_install
from rallypoint.own_files import opened, read_file
from rallypoint.watch.follow import Event, Log, check_log
from rallypoint.watch.state import EVALUATION, RunState

_LOOK_S = 0.25
PREDECESSOR_S = 5.0  # so long another process that follows the same log, for the same target, may take to end
_NEEDS = {
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
KINDS = tuple(_NEEDS)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run, for its tracker.

    Attributes:
        name: the name of its folder.
        settings: how it was started.
        step: the first step that will be logged. Whatever the tracker has of this step and later ones is void.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    step: int = 0


class Tracker(Protocol):
    """Takes the figures of one run. Implementations pass `rallypoint.testing.contracts.trackers`.

    `start` comes first, and again whenever the run goes back to an earlier step, or is tracked again from a step on.
    Steps rise between two calls of it. Any method may raise, and may take its time: a tracker has a process of its own.

    One that prints, in five lines::

        class Printing:
            def start(self, run): print(f"{run.name} from step {run.step}")
            def log(self, step, figures): print(step, *(f"{name} {value:.4g}" for name, value in figures.items()))
            def close(self): print("over")
    """

    def start(self, run: RunFacts) -> None:
        """Begin, or go back to ``run.step``."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step: ``{"loss": 2.5, "lr": 0.001}``. Values may be nan or infinite."""

    def close(self) -> None:
        """The end: make everything durable. May be called twice, and without `start`."""


class Position(msgspec.Struct, frozen=True):
    """How far a log was given to a tracker: the file's number on its disk, and how many of its events."""

    file: int = -1
    events: int = 0


def parse_target(text: str) -> str:
    """Return ``KIND:FOLDER`` with the whole path. UsageError if there is no such tracker, or its package is missing."""
    kind, colon, folder = text.partition(":")
    if kind not in _NEEDS or not colon or not folder:
        raise UsageError(f"--track {text}: not KIND:FOLDER, KIND being one of {', '.join(KINDS)}")
    for name in _NEEDS[kind]:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"tracking with {kind} needs {name}: {to_install(kind)}")
    return f"{kind}:{os.path.abspath(folder)}"


def parse_targets(named: Iterable[str]) -> tuple[str, ...]:
    """Return the targets, each once. Raises as `parse_target` does."""
    return tuple(dict.fromkeys(map(parse_target, named)))


def place_of(folder: Path, target: str) -> Path:
    """The file in a run's folder that says how far a tracker has come with this target."""
    return folder / f"tracked-{target.partition(':')[0]}-{hashlib.sha256(target.encode()).hexdigest()[:8]}.json"


def track(
    folder: Path, facts: RunFacts, tracker: Tracker, place: Path, closing: threading.Event, goes_on: Callable[[], bool]
) -> int:  # fmt: skip
    """Give the run's figures to the tracker while the run `goes_on` and `closing` is not set; then what is left. At
    last close the tracker.

    It goes on where an earlier call has ended, by the position in the file `place`: what a killed process has given
    after that is given again. Returns the next step. Raises UsageError if there is no log, or another process does the
    same now, and what the tracker raises.
    """
    check_log(folder)
    with _alone(place):
        log, before = Log(folder), _position(place)
        tracked = _Tracked(tracker, facts)
        while True:
            last = closing.is_set() or not goes_on()  # then what is written by now is all
            generation = log.generation
            while (events := log.piece()) is not None:
                if generation != log.generation:
                    generation, tracked = log.generation, _Tracked(tracker, facts)
                for event in events:
                    tracked.take(event, new=log.file != before.file or tracked.events >= before.events)
            if last:
                tracker.close()
                _write(place, msgspec.json.encode(Position(log.file, tracked.events)))
                return tracked.run.step
            closing.wait(_LOOK_S)


@dataclass(slots=True)
class _Tracked:
    """What of a log was read: `events` of them. Those that are `new` are given to the tracker."""

    tracker: Tracker
    facts: RunFacts
    events: int = 0
    run: RunState = field(default_factory=RunState)
    _begun: bool = False

    def take(self, event: Event, *, new: bool = True) -> None:
        self.events += 1
        step, (version, results) = self.run.step, self.run.evaluation
        if not self.run.take(*event) or self.run.row is None or not new:
            return
        if self.run.went_back or not self._begun:
            self._begun = True
            step = self.run.row[0] if self.run.went_back else step
            self.tracker.start(RunFacts(self.facts.name, self.facts.settings, step))
            if version == step:  # the evaluation of the version that the step begins with is not void
                self.tracker.log(version, {f"{EVALUATION}{name}": value for name, value in results.items()})
        self.tracker.log(*self.run.row)


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
                        "--track` does: there is nothing left to do"
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
