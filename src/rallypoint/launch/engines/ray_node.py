"""What runs on a node of Ray: an actor that supervises one process. It needs no Ray itself.

Lines and the exit go to the driver when it asks for `more`. Nothing else of the job passes through Ray: gradients and
parameters go from process to process over sockets of their own.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rallypoint.errors import RallypointError
from rallypoint.launch import runner
from rallypoint.launch.engines.cluster import Command, Exit
from rallypoint.launch.engines.local import LocalCluster, LocalProcess
from rallypoint.launch.plan import HERE

PATIENCE_S = 10.0  # seconds until `more` answers that there is nothing new
_LINES, _AT_ONCE = 10_000, 1_000  # lines that wait for the driver before the process has to, and those of one answer
_NOT_STARTED = 127  # the status that a shell gives for a program that is not there


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What a node has to know of the machine that started the run: paths that may be others here.

    Attributes:
        node: the Ray node of the driver.
        python: its interpreter.
        runner: its copy of `rallypoint.launch.runner`.
        cwd: its current folder. Where a node has it too, processes run in it.
        code: the folder of the code that the run has kept; "" if there is none.
        marker: a file among the run's snapshots; "" if they are no folder. A node that has it shares that folder.
    """

    node: str
    python: str
    runner: str
    cwd: str
    code: str = ""
    marker: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """Where a process was started: the node's id and host name, and its process id there; 0 if it could not be."""

    node: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class More:
    """What a process printed from line number `first` on, and how it ended. The exit comes after all lines."""

    first: int
    lines: tuple[str, ...]
    exit: Exit | None


class NodeProcess:
    """The actor: one process on this node. The process, and all that it starts, end with the actor at the latest."""

    def __init__(self, node: str = "", address: str = "127.0.0.1") -> None:
        """`node` and `address`: this node's id and IP address; the actor finds them out by itself."""
        self._node, self._address = node, address
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._first = 0  # the number of the first of them
        self._exit: Exit | None = None
        self._process: LocalProcess | None = None

    def start(self, command: Command, driver: Driver, code: bytes = b"") -> Begun:
        """Start the process, unless that was done before.

        `code`: the run's code as a zip file. A command that cannot be started ends at once with a line that says why.
        """
        if not self._node:
            import ray

            self._node = ray.get_runtime_context().get_node_id()
            self._address = ray.util.get_node_ip_address()
        with self._changed:
            if self._process is None and self._exit is None:
                self._start(command, driver, code)
        return Begun(self._node, socket.gethostname(), self._process.process.pid if self._process is not None else 0)

    def more(self, after: int) -> More:
        """Return what is new after the first `after` lines. Waits for it, at most PATIENCE_S.

        Lines before are dropped.
        """
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while self._first < after:
                self._lines.popleft()
                self._first += 1
            self._changed.notify_all()  # there is room now
            while not self._lines and self._exit is None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            lines = tuple(self._lines)[:_AT_ONCE]
            return More(self._first, lines, self._exit if len(lines) == len(self._lines) else None)

    def signal(self, number: int) -> None:
        """Send a signal to the process and to its children."""
        if (process := self._process) is not None:
            process.signal(number)

    def _start(self, command: Command, driver: Driver, code: bytes) -> None:
        if command.role == "server" and driver.marker and not os.path.exists(driver.marker):
            self._refuse(
                f"the node {self._address} does not see {os.path.dirname(driver.marker)}, where snapshots would be: "
                "give --snapshots a URL (s3://...), or a folder that all nodes share, or none"
            )
            return
        try:
            unpacked = "" if driver.node == self._node or not code else unpack(code)
            self._cluster = LocalCluster(unpacked)
            if os.path.isdir(driver.cwd):
                os.chdir(driver.cwd)
            argv = argv_here(command, driver, address=self._address, code=unpacked)
            here = Command(name=command.name, role=command.role, argv=argv, env=command.env)
            self._process = self._cluster.start(here, self._print)
        except (RallypointError, OSError) as error:
            self._refuse(f"on the node {self._address}: {error}" if isinstance(error, OSError) else str(error))
            return
        threading.Thread(target=self._wait, args=(self._process,), name="exit", daemon=True).start()

    def _refuse(self, why: str) -> None:
        self._lines.append(f"error: {why}")
        self._exit = Exit(_NOT_STARTED, started=False)

    def _print(self, line: str) -> None:
        with self._changed:
            while len(self._lines) >= _LINES:
                self._changed.wait()
            self._lines.append(line)
            self._changed.notify_all()

    def _wait(self, process: LocalProcess) -> None:
        how = process.wait()
        with self._changed:
            self._exit = how
            self._changed.notify_all()


def argv_here(command: Command, driver: Driver, *, address: str, code: str) -> tuple[str, ...]:
    """Return the command's argv with this node's interpreter, runner, address and copy of the code (if not "")."""
    paths: Mapping[str, str] = {driver.python: sys.executable, driver.runner: runner.__file__}
    if code and driver.code:
        paths = {**paths, driver.code: code}
    argv: Sequence[str] = [paths.get(argument, argument) for argument in command.argv]
    if command.role != "worker":  # a worker's arguments are the user's
        argv = [argument.replace(HERE, address) for argument in argv]
    return tuple(argv)


def pack(folder: Path) -> bytes:
    """Return the files below a folder as a zip file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder))
    return packed.getvalue()


def unpack(packed: bytes) -> str:
    """Write the files of a zip file to a new folder. Returns the folder. OSError if they cannot be written."""
    folder = tempfile.mkdtemp(prefix="rallypoint-")
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
