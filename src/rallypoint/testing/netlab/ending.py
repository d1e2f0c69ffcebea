"""Ends what runs in a lab's network namespaces."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rallypoint.errors import RallypointError

NETNS_FOLDER = Path("/run/netns")  # where `ip netns` keeps its names
KILL_SECONDS = 10.0


def kill_all(processes: Sequence[subprocess.Popen[Any]], names: Sequence[str]) -> None:
    """Kill and reap these processes, then all others in these namespaces: what those started in other sessions."""
    for process in processes:
        kill_group(process)
    for process in processes:
        process.wait(KILL_SECONDS)
    while _kill_inhabitants(names):  # repeat: a process may have forked between being seen and being killed
        pass


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its group unless it is reaped. Until then its pid, which is the group's, is not reused."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _kill_inhabitants(names: Sequence[str]) -> int:
    """Kill each process in the network namespaces ``names`` and wait for its end. Returns how many there were."""
    inside = {_identity(NETNS_FOLDER / name) for name in names} - {None}
    killed = 0
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        if pid != os.getpid() and _identity(Path(f"/proc/{pid}/ns/net")) in inside:
            killed += _kill_inhabitant(pid, inside)
    return killed


def _kill_inhabitant(pid: int, inside: set[tuple[int, int] | None]) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        if _identity(Path(f"/proc/{pid}/ns/net")) not in inside:  # the pid was reused before we opened it
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(KILL_SECONDS * 1000):
            raise RallypointError(f"process {pid} of a lab did not die within {KILL_SECONDS:g} s of its SIGKILL")
    return True


def _identity(namespace: Path) -> tuple[int, int] | None:
    """Return what is the same for two paths to one namespace; None if it is gone (a zombie has none)."""
    try:
        status = namespace.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
