"""Reports: everything that somebody else needs to understand a run, as a file; and those that a run makes by itself."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import queue
import re
import secrets
import stat
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rallypoint.coordinator.journal import kept_state
from rallypoint.core.cluster.state import ClusterState
from rallypoint.errors import RallypointError, UsageError, to_resume
from rallypoint.launch.engines.cluster import Exit
from rallypoint.launch.folder import CONSOLE, CONSOLE_BEFORE, REPORTS, read_where
from rallypoint.launch.observing.redaction import Redaction, secrets_among, secrets_in
from rallypoint.launch.observing.stacks import ProcessStacks, processes_of
from rallypoint.launch.options import options_of
from rallypoint.launch.plan import PRIVATE, ClusterConfig, Launch, read_plan
from rallypoint.net.frames import PROTOCOL
from rallypoint.net.handshake import ROLES, role_token
from rallypoint.own_files import delete_oldest, is_running
from rallypoint.watch.follow import EVENTS, event_of
from rallypoint.watch.state import RunState

_EVENT_BYTES = 4 << 20  # of the log's end
_MOST_EVENTS = 2000
_LOG_BYTES = 512 << 10
LONG_S = 10.0  # a run whose log says nothing for so long is silent


@dataclass(slots=True)
class Picture:
    """A run as its folder shows it."""

    folder: str  # its name, for commands
    running: bool = False  # somebody runs it now
    silent_s: float | None = None  # seconds since its log was last written; None without a log
    run: RunState = field(default_factory=RunState)  # what the end of the log says of it
    events: list[bytes] = field(default_factory=list)  # the log's last lines
    processes: list[ProcessStacks] = field(default_factory=list)
    plan: Launch | None = None
    state: ClusterState | None = None
    log: str = ""
    tokens: list[str] = field(default_factory=list)  # to be hidden
    troubles: list[str] = field(default_factory=list)  # what could not be read


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


# ---- the first sentence of a report ----


def sentence_of(picture: Picture) -> str:
    """What has happened, to whom, what to do."""
    run = picture.run
    if run.ended == "finished":
        at, why = run.stopped
        stop = f": it was stopped at step {at}: {why}" if at >= 0 else ""
        return f"The run has finished after {run.step} steps{stop}."
    crashed = [process for process in picture.processes if process.crash]
    if run.ended == "failed":
        return f"The run failed {_at(run)}: {_stop(run.why)}{_crashes(crashed)}{_going_on(picture)}"
    if not picture.running:
        if picture.silent_s is None:
            return f"Nothing has happened in {picture.folder}: there is no log of events. Is it a run's folder?"
        return f"The run was interrupted {_at(run)}, and nobody runs it now.{_crashes(crashed)}{_going_on(picture)}"
    if stopped := [process for process in picture.processes if process.state]:
        waits = f"; the run is {_stop(run.waits)}" if run.waits else "."
        return f"{_at(run).capitalize()} {_who(stopped)}{waits} {_wake(stopped)}"
    if run.waits:
        cause = f"{_at(run).capitalize()} the run is {_stop(run.waits)}{_crashes(crashed)}"
        return f"{cause} The stacks say where each process is."
    if crashed:
        owner = crashed[-1].owner
        where = f"in stacks/{owner.name}-{owner.pid}.txt"
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


def _who(processes: list[ProcessStacks]) -> str:
    named = [f"{p.owner.name} (process {p.owner.pid} on {p.owner.host}) is {p.state}" for p in processes[:3]]
    more = f" and {len(processes) - 3} more" if len(processes) > 3 else ""
    return " and ".join(named) + more


def _wake(processes: list[ProcessStacks]) -> str:
    stopped = [str(process.owner.pid) for process in processes if process.state.startswith("stopped")]
    if not stopped:
        return "It comes back when its device answers."
    pids = " ".join(stopped[:10])
    return f"`kill -CONT {pids}` lets it go on, `kill -KILL {pids}` lets another take its place."


def _crashes(processes: list[ProcessStacks]) -> str:
    last = processes[-1] if processes else None
    return f" {last.owner.name} on {last.owner.host} crashed: {_stop(last.crash)}" if last is not None else ""


def _going_on(picture: Picture) -> str:
    if not picture.run.snapshots:
        return ""
    version = picture.run.snapshots[-1]["version"]
    return f" `{to_resume(picture.folder)}` goes on from version {version}."


MOST_BYTES = 16 << 20  # of all texts together
MOST_REPORTS = 24  # in one run's folder
MOST = 8  # reports of one launcher
_STALL_S = 30.0  # a stall takes so long,
_USUAL = 10.0  # ... and so many times the longest of the last steps
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
_END_S = 5.0
_MOST_PROCESSES = 64  # whose stacks are in a report
_VERSIONS = (
    "rallypoint", "torch", "numpy", "msgspec", "fsspec", "zstandard", "cryptography", "xxhash", "safetensors", "ray",
)  # fmt: skip
_OF_PLAN = ("script", "workers", "workers_start", "overrides", "restart", "changes", "resume")  # and options


class RunReport(NamedTuple):
    """A report that has been made: its first sentence, and where it is."""

    sentence: str
    path: Path


def write_report(picture: Picture, out: Path, doctor: str = "") -> RunReport:
    """Write the report of a run to `out`: a zip file (``.zip``), or else a folder, which must be new.

    It holds the newest events, views, stacks, versions, settings and printed lines. `doctor`: what it has said of this
    machine. Raises UsageError if `out` exists or cannot be written.
    """
    redact = Redaction(_known_secrets(picture))
    sentence = redact(sentence_of(picture)).replace("\n", " ")
    left = MOST_BYTES
    try:
        with _writer(out) as write:
            for name, text in _parts(picture, sentence, doctor):
                clean = redact(text).encode(errors="replace")
                if len(clean) > left:
                    clean = clean[: max(0, left)] + b"\n... the report is full\n"
                left -= len(clean)
                write(name, clean)
    except FileExistsError:
        raise UsageError(f"{out} exists already: choose another --out") from None
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}: choose another --out") from None
    return RunReport(sentence, out)


def place_in(folder: Path, kind: str) -> Path:
    """A new name in a run's folder: ``reports/stall-20260131-235959-1a2b.zip``. Of very many reports the oldest go."""
    place = folder / REPORTS
    place.mkdir(mode=0o700, exist_ok=True)
    delete_oldest(place.glob("*-*.zip"), MOST_REPORTS - 1)
    return place / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.zip"


def _known_secrets(picture: Picture) -> list[str]:
    """Values that appear nowhere: the run's tokens, and what environments and arguments hold under secret names."""
    known = [*picture.tokens, *secrets_among(os.environ)]
    for process in picture.processes:
        if process.here:
            known += secrets_among(_environment_of(process.owner.pid))
    if picture.plan is not None:
        known += secrets_in(picture.plan.worker)
    return known


def _environment_of(pid: int) -> Mapping[str, str]:
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return {name: value for name, equals, value in (pair.partition("=") for pair in pairs) if equals}
    return {}


def _parts(picture: Picture, sentence: str, doctor: str) -> Iterator[tuple[str, str]]:
    yield "report.txt", "\n".join([sentence, "", *_overview(picture)]) + "\n"
    yield "events.jsonl", b"\n".join([*picture.events, b""]).decode(errors="replace")
    members, state = [msgspec.to_builtins(view) for view in picture.run.views], picture.state  # as the journal has it
    newest = None if state is None or state.view is None else msgspec.to_builtins(state.view, str_keys=True)
    yield "views.json", _json({"newest": newest, "members": members})
    settings = {} if state is None or state.record is None else state.record.config
    yield "settings.json", _json({"plan": _plan(picture.plan), "settings": settings})
    yield "versions.json", _json(_versions())
    places = set[str]()
    for process in picture.processes[-_MOST_PROCESSES:]:
        owner = process.owner
        head = f"{owner.name} ({owner.role}), process {owner.pid} on {owner.host}"
        lives = process.state or ("lives" if process.here else "is not here any more")
        name = re.sub(r"[^\w.-]", "_", owner.name)[:100]
        place = f"stacks/{name}-{owner.pid}"
        while place in places:  # of a container that was restarted
            place += "-again"
        places.add(place)
        yield f"{place}.txt", f"{head}: {lives}\n{process.stacks or process.why_none}\n"
    if picture.log:
        yield "console.log", picture.log
    if doctor:
        yield "doctor.txt", doctor


def _overview(picture: Picture) -> Iterator[str]:
    yield f"run: {picture.folder}, {'under way' if picture.running else 'not under way'}"
    run = picture.run
    yield f"steps: {run.step} of {(run.plan and run.plan.steps) or 'nobody knows how many'}"
    if picture.silent_s is not None:
        yield f"the last event was {picture.silent_s:.1f} s ago"
    if run.waits:
        yield f"it waits: {run.waits}"
    if run.said:
        yield f"the coordinator's last word: {run.said}"
    for process in picture.processes:
        owner = process.owner
        state = process.crash or process.state or ("lives" if process.here else process.why_none or "ended")
        yield f"{owner.name}: process {owner.pid} on {owner.host}: {state}"
    for trouble in picture.troubles:
        yield f"not read: {trouble}"
    yield f"made {time.strftime('%Y-%m-%d %H:%M:%S %z')}; look through it before you give it to others"


def _plan(plan: Launch | None) -> dict[str, Any]:
    if plan is None:
        return {}
    known = msgspec.to_builtins(plan)
    arguments = max(0, len(plan.worker) - (1 if not plan.script else 2))
    told = [*_OF_PLAN, *options_of(ClusterConfig, without=PRIVATE)]
    return {name: known[name] for name in told} | {"arguments": f"{arguments}, not shown"}


def _versions() -> dict[str, str]:
    found = {"python": sys.version, "system": platform.platform(), "libc": " ".join(platform.libc_ver())}
    found["protocol"] = str(PROTOCOL)
    for package in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode() + "\n"


@contextlib.contextmanager
def _writer(out: Path) -> Iterator[Any]:
    """In the body a function that writes a part: to a new zip file, which is complete or not there, or to a folder."""
    if out.suffix != ".zip":
        out.mkdir(mode=0o700)

        def write(name: str, data: bytes) -> None:
            path = out / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(data)

        yield write
        return
    if os.path.lexists(out):
        raise FileExistsError(out)
    fresh = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        with os.fdopen(fd, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            yield lambda name, data: archive.writestr(name, data)
        fresh.replace(out)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


class AutomaticReports:
    """Makes the reports, each on a thread of its own, so that nothing waits for them.

    A stall is a time without a step: more than 30 s, and more than ten times the longest of the steps before.
    Only one thread may call it.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._made = 0
        self._steps, self._stepped = -1, 0.0
        self._longest = 0.0
        self._told = False  # this stall has its report
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def steps(self, done: int) -> None:
        """So many steps are done now (-1: the job has not begun, or is over). Makes a report of a stall."""
        now = self._clock()
        if done != self._steps:
            if self._steps >= 0 and done >= 0 and not self._told:
                self._longest = max(0.9 * self._longest, now - self._stepped)
            self._steps, self._stepped, self._told = done, now, False
        if done < 0 or self._told or now - self._stepped <= max(_STALL_S, _USUAL * self._longest):
            return
        self._told = True
        self._begin("stall", f"no step for {now - self._stepped:.0f} s", ask=True)

    def ended(self, name: str, how: Exit) -> None:
        """That process has ended. Makes a report if it has crashed."""
        if how.signal in _CRASHES:
            self._begin("crash", f"{name} {how}", ask=False)

    def failed(self) -> None:
        """The run has failed. Makes a report, and waits for it for a moment."""
        self._begin("failure", "", ask=False)
        self.close()

    def said(self) -> list[str]:
        """The sentences about reports that are complete since the last call."""
        lines = list[str]()
        while not self._said.empty():
            lines.append(self._said.get())
        return lines

    def close(self) -> None:
        """Wait for a report that is being made."""
        if self._thread is not None:
            self._thread.join(_END_S)

    def _begin(self, kind: str, why: str, *, ask: bool) -> None:
        if self._made >= MOST or (self._thread is not None and self._thread.is_alive()):
            return
        self._made += 1
        self._thread = threading.Thread(target=self._make, args=(kind, why, ask), name="report", daemon=True)
        self._thread.start()

    def _make(self, kind: str, why: str, ask: bool) -> None:
        try:
            report = write_report(picture_of(self._folder, ask=ask), place_in(self._folder, kind))
        except (RallypointError, OSError) as error:
            self._said.put(f"no report could be made: {error}")
            return
        except Exception as error:  # of a torn file that no version has written: the run goes on
            self._said.put(f"no report could be made: {type(error).__name__}: {error}")
            return
        about = f"{why}. {report.sentence} " if why else ""
        self._said.put(f"{about}a report of it: {report.path}")
