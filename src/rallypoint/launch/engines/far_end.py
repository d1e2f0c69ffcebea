"""The far end of `RemoteCluster`: ``python -m rallypoint.launch.engines.far_end``, started on each host.

It reads messages from standard input, starts processes as `LocalCluster` does, and writes what they print and how they
end to standard output. When its input ends (the connection or the launcher is gone) it kills every process that it has
started, and ends. Each message is one line of JSON.

It ignores the signals whose numbers it is given, as does all that it starts: those with which Slurm tells the launcher
that the job is to run again. ``scancel`` without ``--batch`` sends them to the processes of every step instead.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from rallypoint.errors import RallypointError
from rallypoint.launch.engines.cluster import Command, Exit, devices_of
from rallypoint.launch.engines.local import LocalCluster, LocalProcess


class BeginHost(msgspec.Struct, frozen=True, tag=True):
    """The first message to a host."""

    folder: str  # the run's folder, which is made if it is not there
    working: str  # the working directory of the processes; the home folder if it is not there
    markers: tuple[str, ...]  # files that the launcher has made. A host that sees one shares the folder that it is in.
    # The launcher's Python, and its folder of this package: in command lines both become the host's
    python: str
    package: str
    here: str  # the word that becomes the host's address


class Unpack(msgspec.Struct, frozen=True, tag=True):
    """Unpack this tar archive in the run's folder."""

    archive: bytes


class RunProcess(msgspec.Struct, frozen=True, tag=True):
    """Start a process. `number` names it from now on: names come back, when the coordinator is started again."""

    number: int
    command: Command


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a process and its children."""

    process: int
    number: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A host answers `BeginHost`: which of the markers it sees, its address, and what is wrong there ("": nothing)."""

    sees: tuple[bool, ...]
    address: str = ""
    problem: str = ""


class Unpacked(msgspec.Struct, frozen=True, tag=True):
    """A host answers `Unpack`."""

    problem: str = ""


class ProcessLine(msgspec.Struct, frozen=True, tag=True):
    """A process has printed this line."""

    process: int
    text: str


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """A process has ended; all of its lines came before."""

    process: int
    how: Exit


ToHost = BeginHost | Unpack | RunProcess | Signal
FromHost = Ready | Unpacked | ProcessLine | ProcessEnded
PACKAGE = Path(__file__).parents[2]  # the folder of rallypoint, here
GREETING = "rallypoint-remote-2"  # the first line from a host that is ours: a shell may print a welcome before it


_CONNECTION = "SSH_CONNECTION"  # sshd sets it: the client's address and port, this host's address and port


class FarEnd:
    """The processes on this host, and the stream on which the launcher hears of them."""

    def __init__(self, output: BinaryIO, cluster: LocalCluster) -> None:
        self._output, self._cluster = output, cluster
        self._lock = threading.Lock()
        self._processes: dict[int, LocalProcess] = {}
        self._threads: list[threading.Thread] = []
        self._begin: BeginHost | None = None

    def greet(self) -> None:
        """Write the line that tells this program's output from that of the shell before it."""
        self._write(GREETING.encode())

    def handle(self, message: ToHost) -> None:
        match message:
            case BeginHost():
                self._begin = message
                self._send(_prepared(message))
            case Unpack(archive=archive):
                assert self._begin is not None
                self._send(Unpacked(unpacked(archive, Path(self._begin.folder))))
            case RunProcess():
                self._run(message)
            case Signal(process=process, number=number):
                if (running := self._processes.get(process)) is not None:
                    running.signal(number)

    def wait(self) -> None:
        """Wait until the end of every process has been told."""
        for thread in self._threads:
            thread.join()

    def _run(self, run: RunProcess) -> None:
        assert self._begin is not None
        argv, number = translated(run.command.argv, self._begin), run.number
        if run.command.role != "worker":  # a script's own arguments are left as they are
            here = self._begin.here
            argv = tuple(address_here() + w.removeprefix(here) if w.startswith(here) else w for w in argv)
        command = replace(run.command, argv=argv)
        try:
            process = self._cluster.start(command, lambda text: self._send(ProcessLine(number, text)))
        except RallypointError as error:
            self._send(ProcessEnded(number, Exit(127, reason=str(error), started=False)))
            return
        self._processes[number] = process
        thread = threading.Thread(target=self._wait, args=(number, process), name=f"end of {command.name}")
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def _wait(self, number: int, process: LocalProcess) -> None:
        how = process.wait()
        self._processes.pop(number, None)
        self._send(ProcessEnded(number, how))

    def _send(self, message: FromHost) -> None:
        self._write(msgspec.json.encode(message))

    def _write(self, line: bytes) -> None:
        try:
            with self._lock:
                self._output.write(line + b"\n")
                self._output.flush()
        except OSError:
            pass  # nobody hears us any more: our input ends too


def translated(argv: tuple[str, ...], begin: BeginHost) -> tuple[str, ...]:
    """Return a command line of the launcher's machine as it is here: another Python, another folder of this package."""
    words = list(argv)
    if words[0] == begin.python:
        words[0] = sys.executable
    if len(words) > 1 and words[1].startswith(f"{begin.package}/"):  # the program that runs a script's kept copy
        words[1] = str(PACKAGE) + words[1].removeprefix(begin.package)
    return tuple(words)


def address_here() -> str:
    """Return the address at which this host is reached from the launcher's. In brackets if it is one of IPv6."""
    words = os.environ.get(_CONNECTION, "").split()
    address = words[2] if len(words) == 4 else socket.gethostname()
    address = address.removeprefix("::ffff:") if "." in address else address
    return f"[{address}]" if ":" in address else address


def _prepared(begin: BeginHost) -> Ready:
    sees = tuple(Path(marker).exists() for marker in begin.markers)
    try:
        Path(begin.folder).mkdir(parents=True, exist_ok=True)
        os.chdir(begin.working if Path(begin.working).is_dir() else Path.home())
    except OSError as error:
        why = f"{error.filename}: {error.strerror}; choose a --folder that every host can make"
        return Ready(sees, address_here(), why)
    return Ready(sees, address_here())


def unpacked(archive: bytes, folder: Path) -> str:
    """Unpack an archive. Returns what is wrong, or ""."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            tar.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        return f"the script's copy cannot be unpacked in {folder}: {error}"
    return ""


def main() -> None:
    """Serve the launcher at the other end of standard input and output."""
    for number in sys.argv[1:]:
        signal.signal(int(number), signal.SIG_IGN)
    decoder = msgspec.json.Decoder[ToHost](ToHost)
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may stand between our lines
    with LocalCluster(gpus=devices_of(os.environ)) as cluster:
        remote = FarEnd(output, cluster)
        remote.greet()
        for line in sys.stdin.buffer:
            remote.handle(decoder.decode(line))
        cluster.end()
        remote.wait()


if __name__ == "__main__":
    main()
