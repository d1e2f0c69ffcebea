"""``rallypoint run``: a cluster for one script on this machine, watched until it is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.markup import escape

from rallypoint.errors import RallypointError
from rallypoint.launch.console import RunConsole
from rallypoint.launch.local import Child, LocalCluster
from rallypoint.net.handshake import new_token
from rallypoint.net.member import CoordinatorLink
from rallypoint.net.tcp import TcpTransport
from rallypoint.observe.trace import merge

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start: `worker` is the argv of every worker process."""

    worker: Sequence[str]
    workers: int = 2
    servers: int = 2
    threads: int = 1
    bind: str = "127.0.0.1:0"
    folder: Path = field(default_factory=lambda: new_folder(Path("runs")))
    overrides: dict[str, Any] = field(default_factory=dict)
    trace: Path | None = None
    trace_steps: tuple[int, int] = (5, 7)


class _Interrupted(Exception):
    """SIGTERM or SIGHUP came: end as on Ctrl-C."""


def launch(plan: Launch, console: RunConsole) -> int:
    """Start the cluster, show its progress, end it: the exit status (130 after Ctrl-C)."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return _run(plan, console)
    except (KeyboardInterrupt, _Interrupted):
        console.close()
        console.console.print("[yellow]interrupted: everything has been ended[/yellow]")
        return 130
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def new_folder(parent: Path) -> Path:
    """A folder for a run, named by the time: ``runs/20260131-235959``, with a number if there is one already."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = (parent / (stamp if n == 0 else f"{stamp}-{n}") for n in range(10_000))
    return next(folder for folder in candidates if not folder.exists())


def _run(plan: Launch, console: RunConsole) -> int:
    token = new_token()
    with LocalCluster(token=token, threads=plan.threads, relay=console.relay) as cluster:
        address = cluster.start_coordinator(_coordinator_arguments(plan))
        lost: list[RallypointError] = []
        observer = CoordinatorLink(
            transport=TcpTransport(), address=address, token=token, role="observer", id="launcher",
            on_message=console.show, on_lost=lost.append,
        )  # fmt: skip
        observer.start()
        try:
            for index in range(plan.servers):
                cluster.start_server(f"server{index}")
            workers = [cluster.start_worker(f"worker{index}", plan.worker) for index in range(plan.workers)]
            cluster.wait(workers)
            failed = cluster.failed()
            cluster.end(grace=_GRACE_S)
        finally:
            observer.close()
            console.close()
        if plan.trace is not None:
            _merge_trace(plan, console)
        if failed is None and console.finished:
            return 0
        reason = console.failure or _what_happened(failed)
        console.console.print(f"[bold red]failed[/bold red]: {escape(reason)}", soft_wrap=True)
        return 1


def _what_happened(failed: Child | None) -> str:
    if failed is None:
        return "every worker ended before the job was over: does the script join and loop to the last step?"
    return f"{failed.name} ended with status {failed.process.returncode}"


def _coordinator_arguments(plan: Launch) -> list[str]:
    first, last = plan.trace_steps if plan.trace is not None else (0, 0)
    return [
        "--workers", str(plan.workers), "--servers", str(plan.servers), "--bind", plan.bind,
        "--folder", str(plan.folder.resolve()), "--overrides", msgspec.json.encode(plan.overrides).decode(),
        "--trace-steps", f"{first}:{last}",
    ]  # fmt: skip


def _merge_trace(plan: Launch, console: RunConsole) -> None:
    assert plan.trace is not None
    parts = list(plan.folder.glob("trace-*.json"))
    spans = merge(parts, plan.trace)
    for part in parts:
        part.unlink()
    console.console.print(f"trace of {spans} spans in {plan.trace}: open it at https://ui.perfetto.dev")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Interrupted


