"""What a run's folder says of the run, read for a report: it may be under way, dead, or half-written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.coordinator.journal import kept_state
from rallypoint.core.cluster.state import ClusterState
from rallypoint.errors import RallypointError
from rallypoint.launch.folder import CONSOLE, CONSOLE_BEFORE, COORDINATOR_LOCK, LOCK, read_where
from rallypoint.launch.plan import Launch, read_plan
from rallypoint.launch.reporting.stacks import Process, processes_of
from rallypoint.net.keys import ROLES, role_token
from rallypoint.net.messages import Aborted, Finished, Members, Message, Say, Snapshotted, StepDone, Waiting
from rallypoint.watch.follow import EVENTS, event_of

_EVENT_BYTES = 4 << 20  # of the log's end
_MOST_EVENTS = 2000
_LOG_BYTES = 512 << 10


@dataclass(slots=True)
class Picture:
    """A run as its folder shows it.

    Attributes:
        folder: its name, for commands.
        running: somebody runs it now.
        silent_s: seconds since its log was last written; None without a log.
        step: how many steps are done, as far as the log's end says; `steps`: of how many.
        waits: the last sentence about what the job waits for, if no step has been done since.
        said: the last sentence of another kind.
        ended: "finished", "failed", or "".
        why: why it has ended so.
        stored: the version of the newest snapshot that the log's end names; -1: none.
        events: the log's last lines.
        members: the last views, as the log has them.
        troubles: what could not be read.
    """

    folder: str
    running: bool = False
    silent_s: float | None = None
    step: int = 0
    steps: int = 0
    waits: str = ""
    said: str = ""
    ended: str = ""
    why: str = ""
    stored: int = -1
    events: list[bytes] = field(default_factory=list)
    members: deque[Members] = field(default_factory=lambda: deque(maxlen=20))
    processes: list[Process] = field(default_factory=list)
    plan: Launch | None = None
    state: ClusterState | None = None
    log: str = ""
    tokens: list[str] = field(default_factory=list)  # to be hidden
    troubles: list[str] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """Take one event of the log, in their order."""
        match message:
            case StepDone(step=step):
                self.step, self.waits, self.ended, self.why = step + 1, "", "", ""
            case Waiting(text=text):
                self.waits = text
            case Say(text=text):
                self.said = text
            case Members():
                self.members.append(message)
            case Snapshotted(version=version):
                self.stored = version
            case Finished(stopped_at=at, why=why):
                self.ended, self.why = "finished", f"its script stopped it at step {at}: {why}" if at >= 0 else ""
            case Aborted(reason=reason):
                self.ended, self.why = "failed", reason
            case _:
                if (steps := getattr(message, "steps", None)) is not None:  # Planned
                    self.steps, self.ended, self.why = steps, "", ""


def picture_of(folder: Path, *, ask: bool) -> Picture:
    """Read what the run's folder says; `ask`: the run's processes on this machine write their stacks now.

    Nothing is written there but what they write. Files that are missing, torn or no regular files are left out, and
    named in `troubles`.
    """
    picture = Picture(str(folder), running=is_running(folder))
    with _noting(picture):
        picture.plan = read_plan(_regular(folder, "run.json"))
    with _noting(picture):
        picture.state = kept_state(folder)
    with _noting(picture):
        _read_events(picture, _regular(folder, EVENTS) / EVENTS)
    for name in (CONSOLE_BEFORE, CONSOLE):
        if os.path.lexists(folder / name):
            with _noting(picture):
                picture.log += tail(_regular(folder, name) / name, _LOG_BYTES).decode(errors="replace")
    with contextlib.suppress(RallypointError, OSError):
        picture.tokens.append(read_where(folder).token)
    for path in folder.glob("token-*"):
        with contextlib.suppress(OSError):
            picture.tokens.append(tail(_regular(folder, path.name) / path.name, 1000).decode(errors="replace"))
    picture.tokens += [role_token(token.strip(), role) for token in picture.tokens for role in ROLES]
    picture.processes = processes_of(folder, ask=ask)
    return picture


def is_running(folder: Path) -> bool:
    """True if a launcher or a coordinator on this machine runs the run in this folder."""
    return _held(folder / LOCK) or _held(folder / COORDINATOR_LOCK)


@contextlib.contextmanager
def _noting(picture: Picture) -> Any:
    try:
        yield
    except (RallypointError, OSError) as error:
        picture.troubles.append(f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error))


def _regular(folder: Path, name: str) -> Path:
    """The folder, if that file in it is no link and no pipe, or is missing. Else OSError."""
    path = folder / name
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(0, "not a regular file", str(path))
    return folder


def _read_events(picture: Picture, path: Path) -> None:
    about = path.stat()
    picture.silent_s = max(0.0, time.time() - about.st_mtime)
    lines = tail(path, _EVENT_BYTES).split(b"\n")
    if about.st_size > _EVENT_BYTES:
        del lines[0]  # a part of one
    for line in lines:
        if (event := event_of(line)) is not None:
            picture.take(event[0])
    picture.events = [line for line in lines if line][-_MOST_EVENTS:]


def tail(path: Path, most: int) -> bytes:
    """The last bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def _held(path: Path) -> bool:
    """True if a process has this lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def config_of(state: ClusterState | None) -> dict[str, Any]:
    """The resolved settings, as the journal has them."""
    return {} if state is None or state.record is None else state.record.config


def view_of(state: ClusterState | None) -> Any:
    """The newest view, as the journal has it."""
    return None if state is None or state.view is None else msgspec.to_builtins(state.view, str_keys=True)
