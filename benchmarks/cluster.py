"""What every benchmark here stands on: places to run members in, members that never outlive it, and its figures.

A place is one host of a `Netlab` (a network namespace with a rate-limited link) or this machine itself. Members get one
JSON argument, their task, and write one JSON file, their result; everything they print goes to a log of their own,
which is shown when one fails.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from rallypoint.core.cluster.terms import Terms
from rallypoint.core.plan.topology import Topology
from rallypoint.core.protocol import Say
from rallypoint.errors import RallypointError
from rallypoint.launch import environment
from rallypoint.net.certificates import make_certificates
from rallypoint.net.handshake import new_token
from rallypoint.watch.follow import EVENTS, event_of

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.netlab import Netlab

TUNING = ("pace_mbit", "in_flight_bytes", "tuning has")  # words of what is said of tuning
FOLDER = Path(__file__).resolve().parent
TCP_LIMIT = 1.046  # what TCP's and Ethernet's headers make of 1.0 at an MTU of 1500 bytes
_RESULT = "RALLYPOINT_BENCHMARK_RESULT"
_POLL_S = 0.05
_GLOO_TIMEOUT_S = 120
_PATIENCE_S = 3.0
_LOG_TAIL = 2000
_TABLE_WIDTH = 160
_R = TypeVar("_R")


class BenchmarkFailed(RallypointError):
    """A member failed or took too long: there is no figure."""


# ---- places ----------------------------------------------------------------------------------------------------


class Place(Protocol):
    """Where a member runs."""

    @property
    def address(self) -> str:
        """Its IPv4 address."""

    def popen(self, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Start a process there, in a session of its own."""


class ThisMachine:
    """This machine, its members joined by plain loopback."""

    address = "127.0.0.1"

    def popen(self, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(argv, start_new_session=True, **popen_kwargs)


@dataclass(frozen=True, slots=True)
class Case:
    """Who is there; `rate_mbit` is the rate of every link in both directions (of every worker's, where servers have
    `server_mbit`), None is plain loopback."""

    workers: int
    servers: int
    rate_mbit: float | None
    server_mbit: float | None = None

    @property
    def name(self) -> str:
        """How the tables call it: ``4+2, 1000 Mbit/s``."""
        if self.rate_mbit is None:
            return f"{self.workers}+{self.servers}, loopback"
        rates = f"{self.rate_mbit:g}" + (f"/{self.server_mbit:g}" if self.server_mbit else "")
        return f"{self.workers}+{self.servers}, {rates} Mbit/s"

    def wire_seconds(self, nbytes: int, server_copies: int = 0) -> float:
        """K/B: what a worker's link takes for `nbytes`, or the servers' for so many copies of them together, if that is
        longer (0 without links)."""
        if self.rate_mbit is None:
            return 0.0
        rates = self.rate_mbit, (self.server_mbit or self.rate_mbit) * self.servers / (server_copies or 1)
        return nbytes * 8 / (min(rates) * 1e6)


@dataclass(frozen=True, slots=True)
class Site:
    """The places of one case; `interface` is the one that Gloo is to use there."""

    coordinator: Place
    workers: Sequence[Place]
    servers: Sequence[Place]
    interface: str


@contextlib.contextmanager
def site(case: Case) -> Iterator[Site]:
    """A host with its own link for every member, all gone in the end; without a rate, this machine's loopback."""
    if case.rate_mbit is None:
        here = ThisMachine()
        yield Site(here, [here] * case.workers, [here] * case.servers, "lo")
        return
    with Netlab(hosts=1 + case.workers + case.servers, rate_mbit=case.rate_mbit) as lab:
        coordinator, *others = lab.hosts
        for server in others[case.workers :] if case.server_mbit else ():
            server.set_rate(case.server_mbit)
        yield Site(coordinator, others[: case.workers], others[case.workers :], "eth0")


# ---- members ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    process: subprocess.Popen[Any]
    log: Path


class Members:
    """The processes of one measurement; a context manager that leaves none behind.

    Each holds a lifeline to this process, so they end even when it is killed. `folder` is theirs while it lasts. `tls`:
    their links have TLS, with certificates of their own.
    """

    def __init__(self, *, tls: bool = False) -> None:
        self._tls = tls
        self._members: list[_Member] = []
        self._stack = contextlib.ExitStack()
        self._token = new_token()
        self.coordinator = ""

    def __enter__(self) -> Members:
        self.folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="rallypoint-bench-")))
        self._lifeline, write = os.pipe()
        self._stack.callback(os.close, self._lifeline)
        self._stack.callback(os.close, write)
        self._stack.callback(self._end)
        if self._tls:
            make_certificates(self.folder / "tls")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, place: Place, name: str, argv: Sequence[str], extra: Mapping[str, str]) -> None:
        """Start ``python argv`` at `place`, with more environment."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = place.popen(
                [sys.executable, *argv], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment(name), **extra}, pass_fds=(self._lifeline,),
            )  # fmt: skip
        self._members.append(_Member(name, process, log))

    def start_workers(
        self, at: Site, script: str, tasks: Sequence[msgspec.Struct], racks: Sequence[int] | None = None
    ) -> None:
        """Start a script of this folder once for every worker, each with its task; `racks`: the number of its rack."""
        for index, (place, task) in enumerate(zip(at.workers, tasks, strict=True)):
            argv = [str(FOLDER / script), msgspec.json.encode(task).decode()]
            extra = {"GLOO_SOCKET_IFNAME": at.interface, _RESULT: str(self._result(f"worker{index}"))}
            extra |= {} if racks is None else {environment.NEAR: f"rack{racks[index]}"}
            self.start(place, f"worker{index}", argv, extra)

    def start_aggregators(self, places: Sequence[Place]) -> None:
        """Start an aggregator at each place, near the workers with the same number of their rack."""
        for index, place in enumerate(places):
            argv = ["-m", "rallypoint.cli", "aggregator", "--bind", f"{place.address}:0"]
            self.start(place, f"aggregator{index}", argv, {environment.NEAR: f"rack{index}"})

    def start_rallypoint(
        self, at: Site, *, replication: int = 1, snapshot_seconds: float = 0.0, snapshot_steps: int = 0,
        topology: Topology | None = None, measure_links: bool = False, overrides: Mapping[str, Any] | None = None,
        heartbeat: float = 3.0,
    ) -> None:  # fmt: skip
        """Start a coordinator and the servers, through the product's own command line. `overrides`: as of ``--set``."""
        terms = Terms(
            workers_start=len(at.workers), workers_max=len(at.workers), servers=len(at.servers),
            replication=replication, snapshot_seconds=snapshot_seconds, snapshot_steps=snapshot_steps,
            snapshots=snapshot_seconds > 0 or snapshot_steps > 0, topology=topology or Topology(),
            measure_links=measure_links, heartbeat=heartbeat,
        )  # fmt: skip
        about = {"snapshots": str(self.folder / "snapshots"), "folder": str(self.folder), "overrides": overrides or {}}
        argv = ["-m", "rallypoint.cli", "coordinator", "--bind", f"{at.coordinator.address}:0"]
        argv += ["--terms", msgspec.json.encode(terms).decode(), "--join-info", msgspec.json.encode(about).decode()]
        self.start(at.coordinator, "coordinator", argv, {})
        self.coordinator = ""
        while not self.coordinator:
            over = self._members[-1].process.poll() is not None
            for line in self._members[-1].log.read_text().splitlines(keepends=True):
                if line.startswith(environment.LISTENS_AT) and line.endswith("\n"):
                    self.coordinator = line.removeprefix(environment.LISTENS_AT).strip()
            if over and not self.coordinator:
                self._fail("coordinator", "did not start")
            time.sleep(_POLL_S)
        for index, place in enumerate(at.servers):
            self.start(place, f"server{index}", ["-m", "rallypoint.cli", "server", "--bind", f"{place.address}:0"], {})

    def wait(self, seconds: float) -> None:
        """Until all have ended well; BenchmarkFailed when one has not, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while any(member.process.poll() is None for member in self._members):
            self.check()
            if time.monotonic() > deadline:
                late = next(member for member in self._members if member.process.poll() is None)
                self._fail(late.name, f"was not done after {seconds:.0f} s")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """BenchmarkFailed when one has ended badly."""
        for member in self._members:
            if member.process.poll() not in (None, 0):
                self._fail(member.name, f"ended with status {member.process.returncode}")

    def pid(self, name: str) -> int:
        """A member's process."""
        return next(member.process.pid for member in self._members if member.name == name)

    def kill(self, name: str) -> None:
        """Kill a member (SIGKILL). It need not end well."""
        member = next(member for member in self._members if member.name == name)
        self._members.remove(member)
        member.process.kill()
        member.process.wait()

    def until(self, milestone: Path, seconds: float) -> None:
        """Until a member has touched this file; BenchmarkFailed when one ends badly first, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while not milestone.exists():
            self.check()
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"{milestone.name} was not reached after {seconds:.0f} s")
            time.sleep(_POLL_S / 10)

    def results(self, at: Site, kind: type[_R]) -> list[_R]:
        """What every worker wrote."""
        return [self._read(f"worker{index}", kind) for index in range(len(at.workers))]

    def sentences(self, *words: str) -> list[str]:
        """What the coordinator has said, in order: the lines with one of these words in them."""
        events = map(event_of, (self.folder / EVENTS).read_bytes().splitlines())
        texts = [event[0].text for event in events if event is not None and isinstance(event[0], Say)]
        return [text for text in texts if any(word in text for word in words)]

    def _read(self, name: str, kind: type[_R]) -> _R:
        try:
            return msgspec.json.decode(self._result(name).read_bytes(), type=kind)
        except FileNotFoundError:
            self._fail(name, "left no result")

    def _result(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _environment(self, name: str) -> dict[str, str]:
        return {
            environment.COORDINATOR: self.coordinator,
            environment.TOKEN: self._token,
            environment.TLS: str(self.folder / "tls") if self._tls else "",
            environment.ID: name,
            environment.LIFELINE: str(self._lifeline),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def _fail(self, name: str, what: str) -> NoReturn:
        """Raise, with the last words of whoever ended badly (not only of the one that was noticed)."""
        time.sleep(_POLL_S)
        bad = [m for m in self._members if m.name == name or m.process.poll() not in (None, 0)]
        words = "\n".join(f"--- {m.name}:\n{m.log.read_text(errors='replace')[-_LOG_TAIL:]}" for m in bad)
        raise BenchmarkFailed(f"{name} {what}\n{words}")

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [member.process for member in self._members if member.process.poll() is None]
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + _PATIENCE_S
            while time.monotonic() < deadline and any(process.poll() is None for process in running):
                time.sleep(_POLL_S)
        for member in self._members:
            member.process.wait()


def finish(result: msgspec.Struct) -> None:
    """For members, last: leave the result where whoever started us looks for it. A member of a Gloo group ends here.

    Nobody destroys the group. A thread of it that drops the last reference to an operation takes the GIL. While the
    group is being destroyed that can be a deadlock; at the interpreter's end it aborts the process (before CPython
    3.14). The latter also happens after `destroy_process_group`: modules that torch imports while there is a group keep
    it as a default argument.
    """
    Path(os.environ[_RESULT]).write_bytes(msgspec.json.encode(result))
    if dist.is_initialized():
        atexit._run_exitfuncs()  # that of multiprocessing ends processes that this one has started
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def memory_of_others() -> int:
    """Bytes of this process's RSS that are other members' memory, of which it has read payloads (`net/memory.py`)."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:  # the first line of a mapping
            counts = "/memfd:rallypoint-" in line and " r--s " in line
        elif counts and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def join_gloo(rank: int, workers: int, backend: str = "gloo") -> None:
    """For members: become rank `rank` of the Gloo group of all workers of this measurement, until `finish`."""
    meeting = Path(os.environ[_RESULT]).with_name("gloo")
    dist.init_process_group(
        backend, f"file://{meeting}", rank=rank, world_size=workers, timeout=timedelta(seconds=_GLOO_TIMEOUT_S)
    )


def main(app: typer.Typer) -> None:
    """Run a command line: errors are one sentence, SIGTERM and Ctrl-C leave through the context managers."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except RallypointError as error:
        sys.exit(f"error: {error}")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


# ---- figures ---------------------------------------------------------------------------------------------------


class Spread(msgspec.Struct, frozen=True):
    """The median of some measurements, with the least and the greatest."""

    median: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def show(self, digits: int = 3) -> str:
        """``0.871 [0.860..0.902]``"""
        return f"{self.median:.{digits}f} [{self.least:.{digits}f}..{self.greatest:.{digits}f}]"


def step_times(finishes: Sequence[Sequence[float]], warm_up: int) -> list[float]:
    """The duration of each step after the first `warm_up`, in seconds.

    A step lasts from when all workers hold one version to when all hold the next. `finishes[w][t]` is when worker w had
    version t (version 0 is the start), on this machine's monotonic clock.
    """
    whole = [max(times) for times in zip(*finishes, strict=True)]
    return [after - before for before, after in zip(whole[warm_up:], whole[warm_up + 1 :], strict=False)]


def machine_facts() -> dict[str, str | int]:
    """What the figures were measured on."""
    named = None
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cores": os.cpu_count() or 0,
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table: text on the left in the first two columns, figures on the right."""
    built = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        built.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows:
        built.add_row(*row)
    return built


def report(console: Console, tables: Sequence[Table], results: Any, path: Path | None) -> None:
    """Print the tables and the machine; write `results` with the machine's facts as JSON to `path`, if given."""
    facts = machine_facts()
    console.width = max(console.width, _TABLE_WIDTH)
    for built in tables:
        console.print(built)
    console.print("  ".join(f"{name} {value}" for name, value in facts.items()), style="dim")
    if path is not None:
        document = {"machine": facts, "load": os.getloadavg(), "results": msgspec.to_builtins(results)}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
