"""What a SIGKILL of one worker costs under torchft, and under torchrun elastic with checkpoints.

    python benchmarks/recovery_peers.py --trials 2 --json recovery_peers.json
    pip install torchft-nightly==2026.10.26     # optional: without it, only torchrun is measured
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import msgspec
import torch
import typer
from rich.console import Console

from cluster import FOLDER, BenchmarkFailed, main, report, table
from recovery_peer_member import Task, steps_file, worker_pid_file

Loss = Literal["node", "worker"]

WENT_ON = "went on"
CRASHED = "survivors crashed"
NEVER = "never recovered in 60 s"

TORCHFT = "torchft-nightly==2026.10.26"  # under 0.2.0 the survivors crash: its DDP hook asserts that no peer died
TORCHFT_TIMEOUT_S = 5.0  # of the lighthouse by default, and of Gloo in torchft's train_ddp.py
TORCHRUN_DEAD_AFTER_S = 15  # three heartbeats of 5 s: the defaults of the c10d rendezvous
CHECKPOINT_EVERY = 20

_MEMBER = FOLDER / "recovery_peer_member.py"
_HEARTBEATS = 3  # that an agent must miss
_WARM_UP = 3  # steps that the median leaves out
_REPLACED_AFTER_S = 1.0
_PATIENCE_S = 60.0
_START_S = 180.0
_SETTLED = 10  # steps of each survivor after the replacement's first: all is over then
_POLL_S = 0.02
_LOG_TAIL = 3000
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Else torchrun (2.13) keeps one store for all rounds, and Gloo finds the addresses of the dead in it: restarted
    # workers cannot connect, again and again.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass(frozen=True, slots=True)
class PeerTrial:
    """One kill; times in seconds.

    `stall_s` is the longest time without a finished step of any survivor, less the median step; `steps_lost` are the
    steps done before and done again after; both are None when the survivors did not go on. `rejoined_s` is the time
    from the kill to the replacement's first step.
    """

    tool: str
    version: str
    stall_s: float | None
    steps_lost: int | None
    outcome: str
    rejoined_s: float | None = None


class Mark(NamedTuple):
    """A finished step, on the monotonic clock."""

    at: float
    step: int


# ---- judging ---------------------------------------------------------------------------------------------------


def longest_stall(survivors: Sequence[Sequence[Mark]], killed_at: float) -> float:
    """The longest time without a step of any survivor, less the median step before the kill."""
    usual = statistics.median(
        late.at - early.at
        for marks in survivors
        for early, late in itertools.pairwise(marks[_WARM_UP:])
        if late.at <= killed_at
    )
    merged = sorted(mark.at for marks in survivors for mark in marks)
    return max(late - early for early, late in itertools.pairwise(merged) if late > killed_at) - usual


def steps_again(marks: Sequence[Mark]) -> int:
    """How many steps a worker was thrown back, in all."""
    return sum(max(0, early.step + 1 - late.step) for early, late in itertools.pairwise(marks))


# ---- the processes of one trial --------------------------------------------------------------------------------


class Crew:
    """The processes of one trial; a context manager that leaves none behind."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Crew:
        folder = TemporaryDirectory(prefix="rallypoint-peers-", ignore_cleanup_errors=True)  # logs may still be growing
        self.folder = Path(self._stack.enter_context(folder))
        self._stack.callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str, *arguments: str) -> None:
        """Start the member script with these arguments."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, str(_MEMBER), *arguments], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **_ENVIRONMENT, "TMPDIR": str(self.folder)},
            )  # fmt: skip

    def running(self, name: str) -> bool:
        """Whether that process has not ended."""
        return self._processes[name].poll() is None

    def kill(self, name: str) -> None:
        """SIGKILL; its children go with it (see `die_with_parent`)."""
        self._processes[name].kill()
        self._processes[name].wait()

    def marks(self, seat: int) -> list[Mark]:
        """The steps that the worker in that seat has finished."""
        path = steps_file(self.folder, seat)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [Mark(float(at), int(step)) for at, step in map(str.split, lines)]

    def fail(self, what: str) -> NoReturn:
        """Raise, with everyone's last words."""
        logs = sorted(self.folder.glob("*.log"))
        words = "\n".join(f"--- {log.stem}:\n{log.read_text(errors='replace')[-_LOG_TAIL:]}" for log in logs)
        raise BenchmarkFailed(f"{what}\n{words}")

    def _end(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()


@dataclass(frozen=True, slots=True)
class Rig:
    """How one tool is started and struck. `address` is where its workers meet.

    A replacement that we start takes a new seat; otherwise (`replaces` is false) the tool restarts the same one.
    """

    tool: str
    version: str
    address: Callable[[Crew], str]
    start: Callable[[Crew, Task], None]
    strike: Callable[[Crew, int], None]
    replaces: bool


def name_of(seat: int) -> str:
    """What the process of that seat is called."""
    return f"seat{seat}"


def trial(rig: Rig, workers: int, step_seconds: float, every: int, part: float) -> PeerTrial:
    """Train, kill the last worker when `part` (0 to 1) of a checkpoint interval is over, watch; every time anew."""
    with Crew() as crew:
        address = rig.address(crew)
        tasks = [Task(seat, workers, str(crew.folder), step_seconds, every, address) for seat in range(workers + 1)]
        for task in tasks[:workers]:
            rig.start(crew, task)
        await_step(crew, range(workers), every + int(part * every))
        time.sleep(part * step_seconds)
        victim = workers - 1
        killed_at = time.monotonic()
        rig.strike(crew, victim)
        newcomer = victim
        if rig.replaces:
            newcomer = workers
            time.sleep(_REPLACED_AFTER_S)
            rig.start(crew, tasks[newcomer])
        outcome = watch(crew, range(victim), newcomer, killed_at)
        if outcome != WENT_ON:
            return PeerTrial(rig.tool, rig.version, None, None, outcome)
        survivors = [crew.marks(seat) for seat in range(victim)]
        joined = since(crew.marks(newcomer), killed_at)
        return PeerTrial(
            rig.tool, rig.version, longest_stall(survivors, killed_at), max(map(steps_again, survivors)), outcome,
            joined[0].at - killed_at if joined else None,
        )  # fmt: skip


def await_step(crew: Crew, seats: Sequence[int], step: int) -> None:
    """Until all workers have finished that step."""
    deadline = time.monotonic() + _START_S
    while not all(marks and marks[-1].step >= step for marks in map(crew.marks, seats)):
        if not all(crew.running(name_of(seat)) for seat in seats):
            crew.fail("a worker ended before the kill")
        if time.monotonic() > deadline:
            crew.fail(f"step {step} was not reached in {_START_S:.0f} s")
        time.sleep(_POLL_S)


def watch(crew: Crew, survivors: Sequence[int], newcomer: int, killed_at: float) -> str:
    """The outcome, as soon as it is sure."""
    while time.monotonic() < killed_at + _PATIENCE_S:
        if not all(crew.running(name_of(seat)) for seat in survivors):
            return CRASHED
        joined = since(crew.marks(newcomer), killed_at)
        if joined and all(len(since(crew.marks(seat), joined[0].at)) >= _SETTLED for seat in survivors):
            return WENT_ON
        time.sleep(_POLL_S)
    recent = time.monotonic() - _PATIENCE_S / 4  # no replacement in time; but perhaps they train without it
    return WENT_ON if all(len(since(crew.marks(seat), recent)) >= _SETTLED for seat in survivors) else NEVER


def since(marks: Sequence[Mark], at: float) -> list[Mark]:
    """Those later than that."""
    return [mark for mark in marks if mark.at > at]


# ---- the tools -------------------------------------------------------------------------------------------------


@functools.cache
def why_not_torchft() -> str | None:
    """A sentence when torchft cannot be measured here, and what to do about it; None when it can."""
    if importlib.util.find_spec("torchft") is None:
        return f"torchft is not installed: pip install {TORCHFT}"
    try:
        with Crew() as crew:
            start_lighthouse(crew, 1, TORCHFT_TIMEOUT_S)
    except BenchmarkFailed as failure:
        return f"torchft {torchft_version()} is installed, but its lighthouse does not start: {failure}"
    return None


def torchft_version() -> str:
    """Of the stable package or of the nightly one, whichever is there."""
    packages = importlib.metadata.packages_distributions().get("torchft", [])
    return " and ".join(sorted({f"{name} {importlib.metadata.version(name)}" for name in packages})) or "unknown"


def start_lighthouse(crew: Crew, min_replicas: int, timeout_s: float) -> str:
    """Start torchft's lighthouse; its address."""
    address = crew.folder / "lighthouse.address"
    crew.start("lighthouse", "lighthouse", str(address), str(min_replicas), str(round(timeout_s * 1000)))
    deadline = time.monotonic() + _START_S
    while not address.exists():
        if not crew.running("lighthouse") or time.monotonic() > deadline:
            crew.fail("torchft's lighthouse did not start")
        time.sleep(_POLL_S)
    return address.read_text()


def measure_torchft(
    trials: int, workers: int = 4, step_seconds: float = 0.25, *, timeout_s: float = TORCHFT_TIMEOUT_S
) -> list[PeerTrial]:
    """Kill one of `workers` replica groups of one process each; a new one starts 1 s later. Needs torchft.

    `timeout_s` is how long the lighthouse waits for a heartbeat and Gloo for a peer. It makes up most of the stall,
    and bounds how late a healthy worker may be.
    """

    def address(crew: Crew) -> str:
        return start_lighthouse(crew, workers - 1, timeout_s)

    def start(crew: Crew, task: Task) -> None:
        task = msgspec.structs.replace(task, timeout_s=timeout_s)
        crew.start(name_of(task.seat), "torchft", msgspec.json.encode(task).decode())

    def strike(crew: Crew, seat: int) -> None:
        crew.kill(name_of(seat))

    rig = Rig(f"torchft, timeouts {timeout_s:g} s", torchft_version(), address, start, strike, replaces=True)
    return [trial(rig, workers, step_seconds, CHECKPOINT_EVERY, part) for part in parts(trials)]


def measure_torchrun(
    trials: int, workers: int = 4, step_seconds: float = 0.25, *,
    loss: Loss = "node", dead_after_s: int = TORCHRUN_DEAD_AFTER_S, every: int = CHECKPOINT_EVERY,
) -> list[PeerTrial]:  # fmt: skip
    """Kill one of `workers` single-worker nodes of an elastic job; rank 0 writes a checkpoint `every` so many steps.

    ``node`` kills an agent with its worker, and a new agent starts 1 s later; it gets in when the rendezvous takes the
    old one for dead, after `dead_after_s` (a multiple of 3). ``worker`` kills the worker only, and its agent starts
    another. The agent that hosts the rendezvous is never the one killed: the job would end.
    """

    def address(crew: Crew) -> str:
        return f"127.0.0.1:{free_port()}"

    def start(crew: Crew, task: Task) -> None:
        crew.start(
            name_of(task.seat), "agent", f"--nnodes={workers - 1}:{workers}", "--nproc-per-node=1",
            "--max-restarts=10", "--rdzv-backend=c10d", f"--rdzv-endpoint={task.address}", "--rdzv-id=peers",
            f"--rdzv-conf=is_host={int(task.seat == 0)},keep_alive_interval={dead_after_s // _HEARTBEATS},"
            f"keep_alive_max_attempt={_HEARTBEATS}", "--local-addr=127.0.0.1",
            str(_MEMBER), "torchrun", msgspec.json.encode(task).decode(),
        )  # fmt: skip

    def strike(crew: Crew, seat: int) -> None:
        worker = int(worker_pid_file(crew.folder, seat).read_text())
        if loss == "node":
            crew.kill(name_of(seat))
        with contextlib.suppress(ProcessLookupError):  # it went with its agent
            os.kill(worker, signal.SIGKILL)

    kind = "worker" if loss == "worker" else f"node, timeout {dead_after_s} s"
    rig = Rig(f"torchrun elastic, {kind}", str(torch.__version__), address, start, strike, replaces=loss == "node")
    return [trial(rig, workers, step_seconds, every, part) for part in parts(trials)]


def parts(trials: int) -> list[float]:
    """When in a checkpoint interval (and in a step) each trial kills: spread evenly, as accidents are."""
    return [(index + 0.5) / trials for index in range(trials)]


def free_port() -> int:
    """A TCP port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- the command line ------------------------------------------------------------------------------------------

COLUMNS = ("tool", "outcome", "version", "stall s", "steps lost", "rejoined s")


def row(found: PeerTrial) -> list[str]:
    """A line of the table."""
    figures: list[Any] = [found.stall_s, found.steps_lost, found.rejoined_s]
    shown = ["" if each is None else f"{each:.2f}" if isinstance(each, float) else str(each) for each in figures]
    return [found.tool, found.outcome, found.version, *shown]


def run(trials: int, workers: int, step_seconds: float, every: int, path: Path | None) -> None:
    """Measure, print, write."""
    console = Console(highlight=False)
    found: list[PeerTrial] = []
    reason = why_not_torchft()
    if reason is None:
        found += measure_torchft(trials, workers, step_seconds)
        found += measure_torchft(trials, workers, step_seconds, timeout_s=1.0)
    else:
        console.print(reason)
    found += measure_torchrun(trials, workers, step_seconds, every=every)
    found += measure_torchrun(trials, workers, step_seconds, dead_after_s=3, every=every)
    found += measure_torchrun(trials, workers, step_seconds, loss="worker", every=every)
    title = (
        f"SIGKILL of one of {workers} workers, steps of {step_seconds} s; torchrun's checkpoints every {every} steps\n"
        "stall: longest time without a survivor's step, less a step; rejoined: until the replacement's first step"
    )
    report(console, [table(title, COLUMNS, [row(each) for each in found])], found, path)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    trials: Annotated[int, typer.Option(min=1, help="Kills of each kind.")] = 3,
    workers: Annotated[int, typer.Option(min=3, help="Workers, one process each.")] = 4,
    step_seconds: Annotated[float, typer.Option(min=0.01, help="Least time of a step.")] = 0.25,
    every: Annotated[int, typer.Option(min=1, help="Steps between torchrun's checkpoints.")] = CHECKPOINT_EVERY,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
) -> None:
    """Kill a worker under torchft (if it is installed) and under torchrun elastic; see how long training stops."""
    run(trials, workers, step_seconds, every, json)


if __name__ == "__main__":
    main(app)
