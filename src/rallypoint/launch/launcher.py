"""``rallypoint run``: a cluster for one script on this machine, watched and mended until it is over."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.markup import escape

from rallypoint.errors import ConfigError, DataError, LinkError, RallypointError, UsageError
from rallypoint.launch.console import RunConsole
from rallypoint.launch.local import Child, LocalCluster
from rallypoint.net.handshake import new_token
from rallypoint.net.member import CoordinatorLink
from rallypoint.net.messages import Finished, Resize
from rallypoint.net.tcp import TcpTransport
from rallypoint.observe.trace import merge
from rallypoint.store.retention import Retention

RUN_FILE = "run.json"
CLUSTER_FILE = "cluster.json"
SNAPSHOTS = "snapshots"
_GRACE_S = 5.0
_POLL_S = 0.02
_SILENCE_S = 5.0  # after so long a wait says what it waits for
_QUICK_S = 10.0  # a process that dies within so long of its start may do so again
_PAUSES_S = (0.0, 0.2, 1.0, 3.0)
_QUICK_DEATHS = 12  # in a row, after which there is no sense in starting another

INTERRUPTED = 130  # the exit status after Ctrl-C


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What to start: `worker` is the argv of every worker process. Saved in the run's folder, so that it can go on.

    `workers` is (least, most): below the least the job waits; `standby` more are started, imported and connected.
    """

    worker: tuple[str, ...]
    workers: tuple[int, int] = (1, 2)
    workers_start: int = 2
    standby: int = 0
    servers: int = 2
    replication: int = 1
    heartbeat: float = 3.0
    backup_tasks: bool = False
    threads: int = 1
    bind: str = "127.0.0.1:0"
    folder: str = ""
    overrides: dict[str, Any] = {}
    snapshots: str = ""
    snapshot_steps: int = 0
    snapshot_seconds: float = 60.0
    compression: str = "none"
    retention: Retention = Retention()
    restart: bool = True
    trace: str = ""
    trace_steps: tuple[int, int] = (5, 7)
    resume: str = ""


class Interrupted(Exception):
    """SIGTERM or SIGHUP came: end as on Ctrl-C."""


def launch(plan: Launch, console: RunConsole, intervene: Callable[[LocalRun], None] | None = None) -> int:
    """Start the cluster, show its progress, mend it, end it: the exit status (130 after Ctrl-C).

    `intervene` is called again and again while it runs; it may do things to the cluster.
    """
    folder = Path(plan.folder)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_a_second(folder)
    write_plan(plan)
    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with LocalRun(plan, console) as run:
            return run.watch(intervene or _let_be)
    except (KeyboardInterrupt, Interrupted):
        console.close()
        console.console.print("[yellow]interrupted: everything has been ended[/yellow]")
        if plan.snapshots and console.snapshots:
            console.console.print(f"to go on: rallypoint resume {escape(plan.folder)}")
        return INTERRUPTED
    finally:
        (folder / CLUSTER_FILE).unlink(missing_ok=True)
        for number, handler in previous.items():
            signal.signal(number, handler)


def new_folder(parent: Path) -> Path:
    """A folder for a run, named by the time: ``runs/20260131-235959``, with a number if there is one already."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = (parent / (stamp if n == 0 else f"{stamp}-{n}") for n in range(10_000))
    return next(folder for folder in candidates if not folder.exists())


def parse_workers(text: str) -> tuple[tuple[int, int], int]:
    """``4`` or ``2:8`` as ((least, most), how many to begin with). ConfigError when it is neither.

    A plain number is what the job begins with; it goes on with fewer while some are gone. Of a range the least begin.
    """
    least, colon, most = text.partition(":")
    if not (least.isdigit() and (most.isdigit() or not colon)) or int(least) < 1 or (colon and int(most) < int(least)):
        raise ConfigError(f"'{text}' is not a number of workers: write 4, or 2:8 for from two to eight")
    if not colon:
        return (1, int(least)), int(least)
    return (int(least), int(most)), int(least)


def write_plan(plan: Launch) -> None:
    """Keep the plan in the run's folder."""
    path = Path(plan.folder) / RUN_FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2))


def read_plan(folder: Path) -> Launch:
    """The plan of an earlier run. DataError when there is none."""
    try:
        return msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=Launch)
    except FileNotFoundError:
        raise DataError(f"{folder} is not the folder of a run: there is no {RUN_FILE} in it") from None
    except msgspec.DecodeError as error:
        raise DataError(f"{folder / RUN_FILE} cannot be read: {error}") from None


class LocalRun:
    """A running cluster; a context manager that leaves no process behind.

    What dies by a signal is started again: the coordinator where it was, servers and workers under new names.
    """

    def __init__(self, plan: Launch, console: RunConsole) -> None:
        self.plan, self.console = plan, console
        self.workers_wanted = plan.workers[1] + plan.standby
        self.servers_wanted = plan.servers
        self._token = new_token()
        self.cluster = LocalCluster(token=self._token, threads=plan.threads, relay=console.relay)
        self._names: Counter[str] = Counter()
        self._quick_deaths: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}
        self._observer: CoordinatorLink | None = None
        self.failure = ""

    def __enter__(self) -> LocalRun:
        try:
            self._start()
        except BaseException:
            self.cluster.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.cluster.end(grace=_GRACE_S if kind is None else 0.0)
        if self._observer is not None:
            self._observer.close()
        self.console.close()

    def _start(self) -> None:
        address = self.cluster.start_coordinator(_coordinator_arguments(self.plan, self.plan.bind))
        _write_secret(Path(self.plan.folder) / CLUSTER_FILE, {"coordinator": address, "token": self._token})
        self._observer = CoordinatorLink(
            transport=TcpTransport(), address=address, token=self._token, role="observer", id="launcher",
            on_message=self.console.show, on_lost=self._on_lost,
        )  # fmt: skip
        self._observer.start()
        for _ in range(self.servers_wanted):
            self.add("server")
        for _ in range(self.workers_wanted):
            self.add("worker")

    def add(self, role: str) -> Child:
        """One more server or worker."""
        name = f"{role}{self._names[role]}"
        self._names[role] += 1
        if role == "server":
            return self.cluster.start_server(name)
        return self.cluster.start_worker(name, self.plan.worker)

    def resize(self, workers: int) -> None:
        """Let so many workers compute from now on: start more, or tell some to hand over and go."""
        assert self._observer is not None
        self.workers_wanted = workers + self.plan.standby
        self._observer.send(Resize(workers))
        alive = self.cluster.of_role("worker")
        for child in alive[self.workers_wanted :]:
            child.signal(signal.SIGTERM)
        for _ in range(self.workers_wanted - len(alive)):
            self.add("worker")

    def watch(self, intervene: Callable[[LocalRun], None]) -> int:
        """Until the job is over: the exit status."""
        with _interrupts_noted() as interrupts:
            self._look_after(intervene, interrupts)
        self._wait_for_workers()
        return self._verdict()

    def _look_after(self, intervene: Callable[[LocalRun], None], interrupts: Sequence[int]) -> None:
        while not (self.console.finished or self.console.failure or self.failure):
            if interrupts:
                raise Interrupted
            self._replace_dead()
            self.console.warn_of_silence(2 * _SILENCE_S)  # it says what it waits for more often than that
            intervene(self)
            if not self.cluster.of_role("worker") and not self._awaits("worker") and not self.console.finished:
                time.sleep(_GRACE_S / 10)  # the last word may be on its way
                if not (self.console.finished or self.console.failure or self.failure):
                    self.failure = (
                        "every worker ended before the job was over: does the script join and loop to the last step?"
                    )
            time.sleep(_POLL_S)

    def _wait_for_workers(self) -> None:
        """Those that took part may still save the model; one that has only just been started has nothing to do here."""
        for child in self.cluster.of_role("worker"):
            if child.name not in self._members:
                child.signal(signal.SIGKILL)
        said = time.monotonic()
        while self.console.finished and (left := self.cluster.of_role("worker")):
            time.sleep(_POLL_S)
            if time.monotonic() - said > _SILENCE_S:
                said = time.monotonic()
                names = ", ".join(child.name for child in left)
                self.console.console.print(f"the job is over; waiting for {names}, whose script goes on")
        self.cluster.end(grace=_GRACE_S)

    @property
    def _members(self) -> set[str]:
        members = self.console.members
        return set() if members is None else {*members.workers, *members.standby}

    def _verdict(self) -> int:
        self.console.close()
        if self.plan.trace:
            _merge_trace(self.plan, self.console)
        lasting = [
            child for child in self.cluster.children
            if child.name in self._members and child.process.returncode not in (0, None)
        ]  # fmt: skip
        if self.console.finished and not lasting:
            return 0
        reason = self.console.failure or self.failure or "; ".join(child.ending for child in lasting)
        self.console.console.print(f"[bold red]failed[/bold red]: {escape(reason)}", soft_wrap=True)
        return 1

    # ---- mending ----

    def _replace_dead(self) -> None:
        for child in [child for child in self.cluster.children if not child.alive]:
            self._ended(child)
        for role, wanted in (("server", self.servers_wanted), ("worker", self.workers_wanted)):
            if self._awaits(role) and time.monotonic() >= self._not_before.get(role, 0.0):
                missing = wanted - len(self.cluster.of_role(role))
                for _ in range(missing):
                    self.add(role)
                self._not_before.pop(role, None)

    def _awaits(self, role: str) -> bool:
        return role in self._not_before

    def _ended(self, child: Child) -> None:
        if child.role == "worker" and child.process.returncode == 0:
            self.cluster.forget(child)
            return  # it has left, as it was told, or the job is over
        if child.role == "coordinator" and child.process.returncode == 0:
            self.console.show(Finished())  # our link to it was down when it said so
            return
        if not child.died or not self.plan.restart:
            if not (self.console.finished or self.console.failure):
                time.sleep(_GRACE_S / 10)  # the reason may be on its way
                self.failure = self.failure or self.console.failure or child.ending
            return
        self.cluster.forget(child)
        self._quick_deaths[child.role] += 1
        if time.monotonic() - child.started > _QUICK_S:
            self._quick_deaths[child.role] = 1
        deaths = self._quick_deaths[child.role]
        if deaths > _QUICK_DEATHS:
            self.failure = f"{child.ending}; it is not started again: {deaths} {child.role}s in a row died soon"
            return
        self.console.console.print(f"[yellow]{escape(child.ending)}: starting another[/yellow]")
        if child.role == "coordinator":
            self.cluster.start_coordinator(_coordinator_arguments(self.plan, self.cluster.coordinator, again=True))
        else:
            self._not_before[child.role] = time.monotonic() + _PAUSES_S[min(deaths - 1, len(_PAUSES_S) - 1)]

    def _on_lost(self, error: RallypointError) -> None:
        if not (self.console.finished or self.console.failure):
            self.failure = f"the coordinator is gone: {error}"


def _refuse_a_second(folder: Path) -> None:
    """UsageError when a run is under way in this folder: two would overwrite each other's journal."""
    try:
        where = msgspec.json.decode((folder / CLUSTER_FILE).read_bytes(), type=dict[str, str])
        TcpTransport().connect(where["coordinator"], timeout=1.0).close()
    except (OSError, KeyError, msgspec.DecodeError, LinkError):
        return  # there is none, or it has been killed
    raise UsageError(f"a run is under way in {folder}: end it first, or choose another --folder")


def _let_be(_: LocalRun) -> None:
    """Nobody meddles with this run."""


def _coordinator_arguments(plan: Launch, bind: str, *, again: bool = False) -> list[str]:
    first, last = plan.trace_steps if plan.trace else (0, 0)
    terms = {
        "workers_start": plan.workers_start, "workers_min": plan.workers[0], "workers_max": plan.workers[1],
        "servers": plan.servers, "replication": plan.replication, "heartbeat": plan.heartbeat,
        "backup_tasks": plan.backup_tasks, "snapshot_steps": plan.snapshot_steps,
        "snapshot_seconds": plan.snapshot_seconds, "snapshots": bool(plan.snapshots),
    }  # fmt: skip
    join_info = {
        "overrides": plan.overrides, "folder": str(Path(plan.folder).resolve()), "trace": [first, last],
        "snapshots": plan.snapshots, "compression": plan.compression, "retention": plan.retention,
    }  # fmt: skip
    return [
        "--bind", bind, "--terms", msgspec.json.encode(terms).decode(),
        "--join-info", msgspec.json.encode(join_info).decode(),
        *(["--resume", plan.resume] if plan.resume and not again else []),
    ]  # fmt: skip


def _write_secret(path: Path, content: dict[str, str]) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(msgspec.json.encode(content))


def _merge_trace(plan: Launch, console: RunConsole) -> None:
    parts = list(Path(plan.folder).glob("trace-*.json"))
    spans = merge(parts, Path(plan.trace))
    for part in parts:
        part.unlink()
    console.console.print(f"trace of {spans} spans in {plan.trace}: open it at https://ui.perfetto.dev")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[Sequence[int]]:
    """Ctrl-C and its like are noted here instead of raised anywhere: what was just taking a lock might keep it."""
    noted: list[int] = []
    every = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in every if signal.getsignal(number) is not signal.SIG_IGN]  # as a shell wants it
    previous = {number: signal.signal(number, lambda number, frame: noted.append(number)) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
