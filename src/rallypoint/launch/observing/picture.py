"""What a run's folder says of the run, read for a report: it may be under way, dead, or half-written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.coordinator.journal import kept_state
from rallypoint.core.cluster.state import ClusterState
from rallypoint.errors import RallypointError
from rallypoint.launch.folder import CONSOLE, CONSOLE_BEFORE, COORDINATOR_LOCK, LOCK, read_where
from rallypoint.launch.observing.stacks import Process, processes_of
from rallypoint.launch.plan import Launch, read_plan
from rallypoint.net.handshake import ROLES, role_token
from rallypoint.watch.follow import EVENTS, event_of
from rallypoint.watch.state import RunState

_EVENT_BYTES = 4 << 20  # of the log's end
_MOST_EVENTS = 2000
_LOG_BYTES = 512 << 10
LONG_S = 10.0  # a run whose log says nothing for so long is silent


@dataclass(slots=True)
class Picture:
    """A run as its folder shows it.

    Attributes:
        folder: its name, for commands.
        running: somebody runs it now.
        silent_s: seconds since its log was last written; None without a log.
        run: what the end of the log says of it.
        events: the log's last lines.
        troubles: what could not be read.
    """

    folder: str
    running: bool = False
    silent_s: float | None = None
    run: RunState = field(default_factory=RunState)
    events: list[bytes] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    plan: Launch | None = None
    state: ClusterState | None = None
    log: str = ""
    tokens: list[str] = field(default_factory=list)  # to be hidden
    troubles: list[str] = field(default_factory=list)


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
            picture.run.take(*event)
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


# ---- the first sentence of a report ----

def sentence_of(picture: Picture) -> str:
    """What has happened, to whom, what to do."""
    run = picture.run
    if run.ended == "finished":
        at, why = run.stopped
        by_script = f": its script stopped it at step {at}: {why}" if at >= 0 else ""
        return f"The run has finished after {run.step} steps{by_script}."
    crashed = [process for process in picture.processes if process.crash]
    if run.ended == "failed":
        return f"The run failed {_at(run)}: {_stop(run.why)}{_crashes(crashed)}{_going_on(picture)}"
    if not picture.running:
        if picture.silent_s is None:
            return f"Nothing has happened in {picture.folder}: there is no log of events. Is it a run's folder?"
        return f"The run was interrupted {_at(run)}, and nobody runs it now.{_crashes(crashed)}{_going_on(picture)}"
    if stopped := [process for process in picture.processes if process.state]:
        return f"{_at(run).capitalize()} {_who(stopped)}{_waits(run)} {_wake(stopped)}"
    if run.waits:
        cause = f"{_at(run).capitalize()} the run is {_stop(run.waits)}{_crashes(crashed)}"
        return f"{cause} The stacks say where each process is."
    if crashed:
        where = f"in {_file(crashed[-1])}"
        return f"{_crashes(crashed).strip()} The run goes on {_at(run)}: {where} is what it did."
    if picture.silent_s is not None and picture.silent_s > LONG_S:
        return (
            f"{_at(run).capitalize()} nothing has happened for {picture.silent_s:.0f} s, and the coordinator says "
            "nothing: the stacks say where each process is."
        )
    return f"The run goes on {_at(run)}."


def _at(run: RunState) -> str:
    if not run.step:
        return "before its first step"
    return f"after {run.step}{f' of {run.plan.steps}' if run.plan is not None and run.plan.steps else ''} steps"


def _stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _who(processes: list[Process]) -> str:
    named = [f"{p.owner.name} (process {p.owner.pid} on {p.owner.host}) is {p.state}" for p in processes[:3]]
    more = f" and {len(processes) - 3} more" if len(processes) > 3 else ""
    return " and ".join(named) + more


def _waits(run: RunState) -> str:
    return f"; the run is {_stop(run.waits)}" if run.waits else "."


def _wake(processes: list[Process]) -> str:
    stopped = [str(process.owner.pid) for process in processes if process.state.startswith("stopped")]
    if not stopped:
        return "It comes back when its device answers."
    pids = " ".join(stopped[:10])
    return f"`kill -CONT {pids}` lets it go on, `kill -KILL {pids}` lets another take its place."


def _crashes(processes: list[Process]) -> str:
    last = processes[-1] if processes else None
    return f" {last.owner.name} on {last.owner.host} crashed: {_stop(last.crash)}" if last is not None else ""


def _file(process: Process) -> str:
    return f"stacks/{process.owner.name}-{process.owner.pid}.txt"


def _going_on(picture: Picture) -> str:
    if not picture.run.snapshots:
        return ""
    version = picture.run.snapshots[-1]["version"]
    return f" `rallypoint resume {shlex.quote(picture.folder)}` goes on from version {version}."
