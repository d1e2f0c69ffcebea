"""A real coordinator process and thousands of members that are only sockets: how late is a view, and what does it cost?

    python benchmarks/members.py --workers 1800 --servers 200

The coordinator is a process of its own (`CoordinatorService`, TCP, tokens, journal). Each member has a connection with
the real greeting, beats and reports; no model is behind it (`members_crowd.py`). Workers die: one, one after another,
five at once. A view's latency is from the end of the dead member's socket to the moment at which a member has read the
message that says so. All processes share the machine's cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from members_crowd import PATIENCE_S, TOKEN, Came, crowd, members_of
from rallypoint.core.cluster.terms import Terms
from scale_cluster import Size, named

_STACK = 256 << 10
_spawn = multiprocessing.get_context("spawn")


def coordinate(pipe: Pipe, terms: Terms, whole: bool, profile: str, switch: float) -> None:
    """The coordinator's process: says where it listens, and ends when it is told to. `whole`: without differences."""
    from rallypoint.coordinator.joining import Tickets
    from rallypoint.coordinator.service import CoordinatorService, JoinInfo

    if whole:
        Tickets.news = Tickets.views  # type: ignore[method-assign]
    threading.stack_size(_STACK)
    if switch:
        sys.setswitchinterval(switch)
    with tempfile.TemporaryDirectory() as folder:
        service = CoordinatorService(terms=terms, token=TOKEN, join_info=JoinInfo(folder=folder))
        if profile:
            _profiled(service, profile)
        service.start()
        pipe.send(service.address)
        pipe.recv()
        if profile:
            service.abort("the benchmark is over")
            service.wait()
            service._owner.stop()
        os._exit(0)  # thousands of connections need not be closed one by one


def _profiled(service: Any, path: str) -> None:
    """Write a profile of the owner's thread into this file when the thread ends."""
    import cProfile

    from rallypoint.coordinator.inbox import Owner

    run = Owner._run

    def profiled(owner: Owner) -> None:
        profile = cProfile.Profile(time.thread_time)
        profile.runcall(run, owner)
        profile.dump_stats(path)

    Owner._run = profiled  # type: ignore[assignment, method-assign]


@dataclass(slots=True)
class Members:
    """All members: processes of them, and what they have read."""

    size: Size
    pipes: list[Pipe] = field(default_factory=list)
    names: list[tuple[str, ...]] = field(default_factory=list)
    came: dict[tuple[int, int], list[Came]] = field(default_factory=dict)
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    done: int = 0  # orders that were answered

    def begin(self, address: str, beat: float, processes: int) -> None:
        """Start the processes."""
        self.names = members_of(self.size, processes)
        for _ in self.names:
            here, there = _spawn.Pipe()
            _spawn.Process(target=crowd, args=(there, address, self.size, beat), daemon=True).start()
            self.pipes.append(here)

    def order(self, order: str, told: Sequence[tuple[str, ...]] | int = ()) -> None:
        """Tell each process, and wait until all have done it."""
        self.done = 0
        for number, pipe in enumerate(self.pipes):
            pipe.send((order, told if isinstance(told, int) else told[number] if told else ()))
        while self.done < len(self.pipes):
            self._take()

    def _take(self) -> None:
        ready = wait(self.pipes, PATIENCE_S)
        if not ready:
            raise SystemExit("members: nothing has come for long")
        for pipe in ready:
            assert isinstance(pipe, Pipe)
            match pipe.recv():
                case str():
                    self.done += 1
                case Exception() as error:
                    raise SystemExit(f"members: {error}")
                case told:
                    for one in told:
                        if isinstance(one, Came):
                            self.came.setdefault(one.number, []).append(one)
                        else:
                            self.sizes[one.number] = one.members

    def join(self) -> None:
        """All members join; then workers propose the job."""
        self.order("join", self.names)
        self.order("propose")

    def kill(self, names: Sequence[str]) -> float:
        """End the sockets of these members; returns when it began."""
        now = time.monotonic()
        self.order("kill", [tuple(one for one in names if one in own) for own in self.names])
        return now

    def everywhere(self, members: int) -> list[Came]:
        """Wait until all of so many members have read a view in which they are, and nobody else."""
        while True:
            for number, count in self.sizes.items():
                if count == members and len(self.came.get(number, ())) >= members:
                    return self.came[number]
            self._take()


def spent(pid: int) -> tuple[float, float]:
    """A process's processor seconds, and MB of memory."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    memory = Path(f"/proc/{pid}/status").read_text()
    kilobytes = int(next(line for line in memory.splitlines() if line.startswith("VmRSS")).split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), kilobytes / 1024


def at(share: float, values: list[float]) -> float:
    """A quantile: the value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(slots=True)
class Phases:
    """Measures phase after phase."""

    crowd: Members
    pid: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    dead: int = 0
    _began: float = 0.0
    _used: float = 0.0

    @property
    def members(self) -> int:
        """How many live."""
        return self.crowd.size.workers + self.crowd.size.servers - self.dead

    def begin(self) -> None:
        """Begin a phase."""
        self._began, (self._used, _) = time.monotonic(), spent(self.pid)

    def end(self, phase: str, **more: Any) -> None:
        """End it."""
        took, (used, memory) = time.monotonic() - self._began, spent(self.pid)
        self.rows.append({"phase": phase, "seconds": took, "processor": used - self._used, "MB": memory, **more})
        print(f"{phase}: {took:.1f} s", file=sys.stderr, flush=True)

    def join(self) -> None:
        """All members join, and get the first view."""
        self.begin()
        self.crowd.join()
        self.end("join")
        self.begin()
        self.end("the first view, whole", **_bytes(self.crowd.everywhere(self.members)))

    def stay(self, seconds: float) -> None:
        """A step each second, beside the beats."""
        self.begin()
        step, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            self.crowd.order("step", step)
            step += 1
            time.sleep(max(0.0, began + step - time.monotonic()))
        self.end(f"steady, {step} steps")

    def die(self, phase: str, times: int, at_once: int = 1) -> None:
        """So many times, so many workers die at once."""
        self.begin()
        came, late = list[Came](), list[float]()
        before = sum(one.nbytes for read in self.crowd.came.values() for one in read)
        for _ in range(times):
            last = self.crowd.size.workers - self.dead
            self.dead += at_once
            when = self.crowd.kill([named("worker", last - 1 - number) for number in range(at_once)])
            found = self.crowd.everywhere(self.members)
            came += found
            late += [one.when - when for one in found]
        after = sum(one.nbytes for read in self.crowd.came.values() for one in read)
        quantiles = {"median": at(0.5, late), "p99": at(0.99, late), "last": max(late)}
        self.end(phase, **{**_bytes(came), "bytes": after - before}, **quantiles)


def _bytes(came: list[Came]) -> dict[str, Any]:
    total = sum(one.nbytes for one in came)
    return {"bytes": total, "bytes_each": total / len(came)}


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The table of these phases."""
    table = Table("phase", "seconds", "coordinator's processor, s", "memory, MB", "sent, MB", "a message, bytes",
        "view: median, s", "p99", "last")  # fmt: skip
    for row in rows:
        figures = [f"{row['seconds']:.2f}", f"{row['processor']:.2f}", f"{row['MB']:.0f}"]
        sent = [f"{row['bytes'] / 1e6:.2f}", f"{row['bytes_each']:,.0f}"] if "bytes" in row else ["", ""]
        late = [f"{row[name]:.3f}" if name in row else "" for name in ("median", "p99", "last")]
        table.add_row(row["phase"], *figures, *sent, *late)
    return table


def main(
    workers: Annotated[int, typer.Option(help="How many workers.")] = 1800,
    servers: Annotated[int, typer.Option(help="How many servers.")] = 200,
    deaths: Annotated[int, typer.Option(help="How many workers die, one after another.")] = 5,
    steady: Annotated[float, typer.Option(help="Seconds of beats and reports, a step each second.")] = 10.0,
    heartbeat: Annotated[float, typer.Option(help="Seconds after which a silent member is given up.")] = 10.0,
    processes: Annotated[int, typer.Option(help="In so many processes the members are.")] = 2,
    whole: Annotated[bool, typer.Option(help="Send every view whole, as before there were differences.")] = False,
    profile: Annotated[str, typer.Option(help="Write a profile of the coordinator's one thread that decides.")] = "",
    switch: Annotated[float, typer.Option(help="sys.setswitchinterval in the coordinator; 0: Python's own.")] = 0.1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Drive a real coordinator with members that are only sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    terms = Terms(workers_start=workers, workers_max=workers, servers=servers, heartbeat=heartbeat)
    here, there = _spawn.Pipe()
    process = _spawn.Process(target=coordinate, args=(there, terms, whole, profile, switch), daemon=True)
    process.start()
    crowd_of = Members(Size(workers=workers, servers=servers))
    crowd_of.begin(here.recv(), heartbeat / 4, processes)
    assert process.pid is not None
    phases = Phases(crowd_of, process.pid)
    phases.join()
    phases.stay(steady)
    phases.die("a death", 1)
    if deaths > 1:
        phases.die(f"{deaths} deaths, one after another", deaths)
        phases.die(f"{deaths} deaths at once", 1, deaths)
    Console(width=140).print(table_of(phases.rows))
    if json_file is not None:
        found = {"workers": workers, "servers": servers, "whole": whole, "heartbeat": heartbeat, "rows": phases.rows}
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    here.send("over")
    process.join()


if __name__ == "__main__":
    typer.run(main)
