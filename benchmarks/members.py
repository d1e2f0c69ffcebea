"""A real coordinator process and hundreds of members that are only sockets: how late is a view, and what does it cost?

    python benchmarks/members.py --workers 450 --servers 50

The coordinator is a process of its own (`CoordinatorService`, TCP, tokens, journal). Each member has a connection with
the real greeting, beats and reports; no model is behind it. Members die one after another. A view's latency is from the
end of the dead member's socket to the moment at which a member has read the message that says so. Members decode each
message; one of them makes the whole view of it, for the others it would only use the processor that all share here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import resource
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rallypoint.core.cluster.terms import Terms
from rallypoint.core.view import View
from rallypoint.errors import RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.handshake import COORDINATOR, introduce
from rallypoint.net.keys import role_token
from rallypoint.net.messages import Applied, Beat, Hello, NewView, Propose, Report
from rallypoint.net.seal import SEALED_BYTES
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.views.messages import ViewChange
from rallypoint.net.views.receiver import ViewReceiver
from rallypoint.testing.scale.cluster import Size, named, record_for

TOKEN, STACK, PATIENCE_S = "a token of the benchmark's", 256 << 10, 300.0


def coordinate(pipe: Pipe, terms: Terms, whole: bool) -> None:
    """The coordinator's process: says where it listens, and ends when it is told to. `whole`: without differences."""
    from rallypoint.coordinator.joining.tickets import Tickets
    from rallypoint.coordinator.service import CoordinatorService, JoinInfo

    if whole:
        Tickets.news = Tickets.views  # type: ignore[method-assign]
    threading.stack_size(STACK)
    with tempfile.TemporaryDirectory() as folder:
        service = CoordinatorService(terms=terms, token=TOKEN, join_info=JoinInfo(folder=folder))
        service.start()
        pipe.send(service.address)
        pipe.recv()
        os._exit(0)  # thousands of connections need not be closed one by one


@dataclass(slots=True)
class Crowd:
    """All members. `came`: (view's number, when it was read, bytes) of each view that a member has read."""

    address: str
    size: Size
    heartbeat: float
    channels: dict[str, Channel] = field(default_factory=dict)
    came: queue.SimpleQueue[tuple[tuple[int, int], float, int]] = field(default_factory=queue.SimpleQueue)
    whole: ViewReceiver = field(default_factory=ViewReceiver)
    view: View | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def join(self) -> None:
        """All members join; workers propose the job, the last of them begins it."""
        names = [(named("server", i), "server") for i in range(self.size.servers)]
        names += [(named("worker", i), "worker") for i in range(self.size.workers)]
        threading.Thread(target=self._beat, daemon=True).start()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda one: self._enter(*one), names))
        proposal = Propose(record_for(self.size))
        for name, channel in list(self.channels.items()):
            if name.startswith("worker"):
                channel.send_message(proposal)

    def _enter(self, name: str, role: str) -> None:
        connection = TcpTransport().connect(self.address, PATIENCE_S)
        listening = "" if role == "worker" else f"127.0.0.1:{20000 + int(name[-5:])}"
        hello = Hello(role, name, f"host-{name}", listening, to=COORDINATOR, process=name.encode())
        _, keys = introduce(connection, hello, role_token(TOKEN, role))
        channel = self.channels[name] = Channel(connection, "the coordinator", keys)
        threading.Thread(target=self._read, args=(name, channel), daemon=True).start()

    def _read(self, name: str, channel: Channel) -> None:
        try:
            while not self.over.is_set():
                header = channel.receive_header()
                message = channel.receive_message(header)
                if isinstance(message, NewView | ViewChange):
                    self._came(name, message, header.length + SEALED_BYTES)
        except RallypointError as error:
            if not self.over.is_set() and name in self.channels:  # it was not killed
                print(f"{name}: {error}", file=sys.stderr)

    def _came(self, name: str, message: NewView | ViewChange, nbytes: int) -> None:
        now = time.monotonic()
        number = message.view.number if isinstance(message, NewView) else message.change.rest.number
        if name == named("worker", 0):
            self.view = self.whole.take(message).view
        self.came.put(((number.epoch, number.count), now, nbytes))

    def _beat(self) -> None:
        while not self.over.wait(self.heartbeat / 4):
            for channel in list(self.channels.values()):
                channel.send_message(Beat())

    def kill(self, name: str) -> float:
        """End a member's socket; returns when."""
        channel = self.channels.pop(name)
        now = time.monotonic()
        channel.close()
        return now

    def step(self, number: int) -> None:
        """Each worker reports its replicas of this step, each server has applied it."""
        assert self.view is not None
        generation = self.view.generation
        for worker, own in self.view.assigned(number).items():
            if (channel := self.channels.get(worker)) is not None:
                for replica in own:
                    channel.send_message(Report(number, replica, 1.0, 1.0, 1, 0.5, generation))
        for server in self.view.servers:
            if (channel := self.channels.get(server.id)) is not None:
                channel.send_message(Applied(number, self.size.workers, time.time(), {}, generation))

    def everywhere(self, members: int) -> tuple[list[float], list[int]]:
        """Wait until so many members have read the newest view. Returns when each did, and the bytes of each."""
        seen: dict[tuple[int, int], list[tuple[float, int]]] = {}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            number, when, nbytes = self.came.get(timeout=max(0.0, deadline - time.monotonic()))
            seen.setdefault(number, []).append((when, nbytes))
            if len(seen[number]) >= members:
                return [when for when, _ in seen[number]], [nbytes for _, nbytes in seen[number]]


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


def measure(crowd: Crowd, pid: int, deaths: int, steady: float) -> list[dict[str, Any]]:
    """Join, stay, die: what each phase took of the coordinator."""
    rows, members = [], crowd.size.workers + crowd.size.servers
    began, (used, _) = time.monotonic(), spent(pid)
    crowd.join()
    times, nbytes = crowd.everywhere(members)
    after, memory = spent(pid)
    rows.append({
        "phase": "join, the first view", "seconds": max(times) - began, "processor": after - used, "MB": memory,
        "bytes": sum(nbytes), "bytes_each": sum(nbytes) / len(nbytes),
    })  # fmt: skip
    began, used, step = time.monotonic(), after, 0
    while time.monotonic() - began < steady:
        crowd.step(step)
        step += 1
        time.sleep(max(0.0, began + step - time.monotonic()))
    took, (after, memory) = time.monotonic() - began, spent(pid)
    rows.append({"phase": f"steady, {step} steps", "seconds": took, "processor": after - used, "MB": memory})
    began, used, latencies, total = time.monotonic(), after, list[float](), list[int]()
    for number in range(deaths):
        members -= 1
        dead = crowd.kill(named("worker", crowd.size.workers - 1 - number))
        times, nbytes = crowd.everywhere(members)
        latencies += [when - dead for when in times]
        total += nbytes
    took, (after, memory) = time.monotonic() - began, spent(pid)
    rows.append({
        "phase": f"{deaths} deaths", "seconds": took, "processor": after - used, "MB": memory, "bytes": sum(total),
        "bytes_each": sum(total) / len(total), "median": at(0.5, latencies), "p99": at(0.99, latencies),
        "last": max(latencies),
    })  # fmt: skip
    return rows


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
    workers: Annotated[int, typer.Option(help="How many workers.")] = 450,
    servers: Annotated[int, typer.Option(help="How many servers.")] = 50,
    deaths: Annotated[int, typer.Option(help="How many workers die, one after another.")] = 10,
    steady: Annotated[float, typer.Option(help="Seconds of beats and reports, a step each second.")] = 10.0,
    heartbeat: Annotated[float, typer.Option(help="Seconds after which a silent member is given up.")] = 120.0,
    whole: Annotated[bool, typer.Option(help="Send every view whole, as before there were differences.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Drive a real coordinator with members that are only sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(STACK)
    terms = Terms(workers_start=workers, workers_max=workers, servers=servers, heartbeat=heartbeat)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=coordinate, args=(there, terms, whole), daemon=True)
    process.start()
    crowd = Crowd(here.recv(), Size(workers=workers, servers=servers), heartbeat)
    assert process.pid is not None
    rows = measure(crowd, process.pid, deaths, steady)
    Console(width=140).print(table_of(rows))
    if json_file is not None:
        found = {"workers": workers, "servers": servers, "whole": whole, "rows": rows}
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    crowd.over.set()
    here.send("over")
    process.join()
    sys.stdout.flush()
    os._exit(0)  # thousands of threads wait for their sockets


if __name__ == "__main__":
    typer.run(main)
