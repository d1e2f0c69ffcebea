"""A cluster of processes on this machine: started together, watched together, ended together.

Children run in sessions of their own, so Ctrl-C reaches only the launcher, which then ends them by pid; each also holds
a lifeline, so that none outlives a launcher that was killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rallypoint.errors import RallypointError
from rallypoint.launch import environment

_GRACE_S = 5.0  # for children to leave by themselves once the job is over
_POLL_S = 0.05
_ANNOUNCE_TIMEOUT_S = 120.0  # to import everything from a cold disk
_OUTPUT_S = 2.0  # for the last lines of a child that has ended


class ChildFailed(RallypointError):
    """A process of the job ended when it should not have."""


@dataclass(slots=True)
class Child:
    """A process of the job; `role` is coordinator, server or worker."""

    name: str
    role: str
    process: subprocess.Popen[bytes]
    reader: threading.Thread
    started: float

    @property
    def alive(self) -> bool:
        """Has it not ended?"""
        return self.process.poll() is None

    @property
    def died(self) -> bool:
        """Was it ended by a signal?"""
        return (self.process.poll() or 0) < 0

    @property
    def ending(self) -> str:
        """How it ended, as a phrase."""
        code = self.process.poll()
        if code is not None and code < 0:
            return f"{self.name} was killed ({signal.Signals(-code).name})"
        return f"{self.name} ended with status {code}"

    def signal(self, number: int) -> None:
        """Send a signal to it, and to whatever it has started."""
        _signal_group(self.process, number)


class LocalCluster:
    """Processes on this machine; a context manager that leaves none behind.

    `relay` gets every line that a child prints: (child's name, line).
    """

    def __init__(self, *, token: str, threads: int, relay: Callable[[str, str], None]) -> None:
        self._token, self._threads, self._relay = token, threads, relay
        self.children: list[Child] = []
        self.coordinator = ""
        self._lifeline_read, self._lifeline_write = os.pipe()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start_coordinator(self, arguments: Sequence[str]) -> str:
        """Start ``rallypoint coordinator``; returns the address once it listens. ChildFailed when it does not."""
        read, write = os.pipe()
        argv = [sys.executable, "-m", "rallypoint.cli", "coordinator", *arguments]
        self._start("coordinator", "coordinator", argv, {environment.ANNOUNCE: str(write)}, keep=(write,))
        os.close(write)
        with open(read, "rb") as announcement:
            heard, _, _ = select.select([announcement], [], [], _ANNOUNCE_TIMEOUT_S)
            if not heard:
                raise ChildFailed(f"the coordinator has not begun to listen within {_ANNOUNCE_TIMEOUT_S:.0f} s")
            self.coordinator = announcement.readline().decode().strip()
        if not self.coordinator:
            raise ChildFailed("the coordinator did not start; its own message is above")
        return self.coordinator

    def start_server(self, name: str, arguments: Sequence[str] = ()) -> Child:
        """Start ``rallypoint server``."""
        argv = [sys.executable, "-m", "rallypoint.cli", "server", *arguments]
        return self._start(name, "server", argv, {})

    def start_worker(self, name: str, argv: Sequence[str]) -> Child:
        """Start a user's script as a worker."""
        return self._start(name, "worker", argv, {})

    def of_role(self, role: str) -> list[Child]:
        """The living children of a role, the oldest first."""
        return [child for child in self.children if child.role == role and child.alive]

    def running(self) -> list[Child]:
        """The children that have not ended."""
        return [child for child in self.children if child.alive]

    def forget(self, child: Child) -> None:
        """A child that has ended, and been replaced."""
        _reap(child)
        self.children.remove(child)

    def end(self, grace: float = 0.0) -> None:
        """End every child: wait `grace` seconds for those that leave by themselves, then SIGTERM, then SIGKILL.

        Workers get SIGINT instead: SIGTERM asks them to hand their work over first.
        """
        for number, patience in ((None, grace), (signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
            if number is not None:
                for child in self.running():
                    child.signal(signal.SIGCONT)
                    polite = number is signal.SIGTERM and child.role == "worker"
                    child.signal(signal.SIGINT if polite else number)
            deadline = time.monotonic() + patience
            while self.running() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        for child in self.children:
            _reap(child)
        with contextlib.suppress(OSError):
            os.close(self._lifeline_write)
            os.close(self._lifeline_read)

    def _start(
        self, name: str, role: str, argv: Sequence[str], extra: Mapping[str, str], keep: tuple[int, ...] = ()
    ) -> Child:
        process = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **self._environment(name), **extra}, pass_fds=(self._lifeline_read, *keep),
            start_new_session=True,
        )  # fmt: skip
        reader = threading.Thread(target=self._read, args=(name, process), name=f"output of {name}", daemon=True)
        child = Child(name, role, process, reader, time.monotonic())
        self.children.append(child)
        reader.start()
        return child

    def _environment(self, name: str) -> dict[str, str]:
        threads = str(self._threads)
        return {
            environment.COORDINATOR: self.coordinator,
            environment.TOKEN: self._token,
            environment.ID: name,
            environment.LIFELINE: str(self._lifeline_read),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
        }

    def _read(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._relay(name, line.decode(errors="replace").rstrip("\n"))


def _reap(child: Child) -> None:
    """A child has ended. What it had started itself goes too: it would live on, and hold the child's output open."""
    child.process.wait()
    child.signal(signal.SIGKILL)
    child.reader.join(_OUTPUT_S)  # longer only if something in a session of its own holds the output


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
