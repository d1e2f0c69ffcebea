"""Processes on machines that another program leads to (`RemoteShell`): ``ssh`` (`SshCluster`), or Slurm's ``srun``.

Nothing of ours runs there before: the program starts `far_end`, which starts the processes, and ends with the
connection.
What a process is told (its token, too) goes through the connection, never onto a command line, which others can read.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, BinaryIO, Self

import msgspec

from rallypoint.errors import Explained, UsageError
from rallypoint.launch.engines import far_end
from rallypoint.launch.engines.cluster import Cluster, Command, Exit
from rallypoint.launch.engines.local import passed_on
from rallypoint.launch.kept_code import CODE
from rallypoint.launch.plan import AUTO, HERE, Host, Launch, coordinators_host, is_loopback, place

FAR_END = "rallypoint.launch.engines.far_end"
_LOST = signal.SIGHUP  # how a process ends whose connection is gone
_LONGEST = 64 << 10  # bytes of a line of the program; a longer one comes in pieces
_END_S = 5.0  # seconds in which a host may end its processes and say so


@dataclass(frozen=True, slots=True)
class RemoteShell:
    """The program that leads to a host, starts the far end there, and carries what both say."""

    name: str  # of the program, for sentences
    command: Callable[[Host], list[str]]  # returns its command line for a host
    # The exit status by which it says that it has failed itself, and not the far end; None if it has none
    failed: int | None
    hint: str  # what to do if there is no Rallypoint on a host


class RemoteProcess:
    """A process on another machine; see `Handle`."""

    def __init__(self, command: Command, number: int, link: HostLink, output: Callable[[str], None]) -> None:
        self.command, self.link = command, link
        self.number, self.output = number, passed_on(command.name, output)
        self.how: Exit | None = None  # it ended; None: it runs

    def exit(self) -> Exit | None:
        """Return None while the process runs; see `Handle.exit`."""
        return self.how

    def signal(self, number: int) -> None:
        """Send a signal to the process and to its children."""
        if self.how is None:
            self.link.send(far_end.Signal(self.number, number))


class HostLink:
    """The connection to one host. Its methods may be called from any thread.

        idle --connect()--> connecting --Ready, Unpacked--> up --the connection ends--> idle
                                |                                                        ^
                                +---------- refused, unreachable, not usable ------------+

    Each host has one connection, whatever runs there. So a host that dies is one event, and many processes need no more
    logins than one (sshd refuses some of those that come at once). What is to run there while the link is connecting
    starts when it is up.
    """

    def __init__(
        self, host: Host, shell: RemoteShell, begin: far_end.BeginHost,
        judge: Callable[[Host, far_end.Ready], str | far_end.Unpack | None],
    ) -> None:  # fmt: skip
        """`judge` returns why a host that is ready cannot be used, or what it has to unpack, or None."""
        self.host, self._begin, self._judge = host, begin, judge
        self._shell = shell
        self._lock = threading.RLock()
        self._client: subprocess.Popen[bytes] | None = None
        self._outgoing = queue.SimpleQueue[bytes]()
        self._threads: list[threading.Thread] = []
        self._waiting: list[far_end.ToHost] = []  # for the link to be up
        self._processes: dict[int, RemoteProcess] = {}
        self._settled = threading.Event()  # up, or failed
        self._errors: list[str] = []
        self.problem = ""  # why there is no connection, as a phrase; "" while there is one
        self.address = ""
        self.up = False
        self.failed_at: float | None = None  # on the clock of time.monotonic; None while there is hope

    def connect(self) -> None:
        """Begin to connect, and return at once. Does nothing if that is done, or under way.

        Raises UsageError if there is no such program.
        """
        with self._lock:
            if self._client is not None:
                return
            self._settled.clear()
            self._errors, self.problem, self.failed_at = [], "", None
            self._client = client = _started(self._shell.command(self.host))
            self._outgoing = queue.SimpleQueue()
            self._write(self._begin)
            assert client.stdin is not None
            assert client.stdout is not None
            assert client.stderr is not None
            writer = threading.Thread(
                target=_write_all, args=(client.stdin, self._outgoing), name=f"to {self.host}", daemon=True
            )
            errors = threading.Thread(
                target=self._note_errors, args=(client.stderr,), name=f"errors of {self.host}", daemon=True
            )
            reader = threading.Thread(
                target=self._read, args=(client, client.stdout, errors), name=f"link to {self.host}", daemon=True
            )
            self._threads = [errors, reader, writer]
            for thread in self._threads:
                thread.start()

    def settled(self, timeout: float) -> bool:
        """Wait until the link is up or has failed. Returns False if neither happens in so many seconds."""
        return self._settled.wait(timeout)

    def run(self, process: RemoteProcess) -> None:
        """Start a process, now or as soon as the link is up. If there will be no link, the process ends as lost."""
        with self._lock:  # so that the link cannot be lost in between
            self.connect()
            self._processes[process.number] = process
            self.send(far_end.RunProcess(process.number, process.command))

    def send(self, message: far_end.ToHost) -> None:
        """Send a message, now or as soon as the link is up. Without a link it is dropped."""
        with self._lock:
            if self.up:
                self._write(message)
            elif self._client is not None:
                self._waiting.append(message)

    def close(self) -> None:
        """End the input of the far end, which kills its processes. Returns at once; see `join`."""
        with self._lock:
            self._outgoing.put(b"")
            if self._client is not None and not self.up:  # nothing runs there; the program may still wait for an answer
                _signal(self._client, signal.SIGTERM)

    def join(self, deadline: float) -> None:
        """Wait until the connection has ended. At `deadline` (time.monotonic) the program is killed."""
        client, threads = self._client, self._threads
        if client is None:  # it has ended by itself; its threads may still be about to
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            return
        try:
            client.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(client, signal.SIGKILL)
        for thread in threads:
            thread.join()

    # ---- the threads ----

    def _write(self, message: far_end.ToHost) -> None:
        """Write to the host, on the writer's thread: a host that hangs reads nothing. The lock is held."""
        self._outgoing.put(msgspec.json.encode(message) + b"\n")

    def _note_errors(self, lines: BinaryIO) -> None:
        with lines:
            while line := lines.readline(_LONGEST):
                if text := line.decode(errors="replace").strip():
                    self._errors = [*self._errors[-9:], text]

    def _read(self, client: subprocess.Popen[bytes], stream: BinaryIO, errors: threading.Thread) -> None:
        decoder = msgspec.json.Decoder[far_end.FromHost](far_end.FromHost)
        greeted = False
        try:
            with stream:
                for line in stream:
                    if greeted:
                        self._handle(decoder.decode(line))
                    greeted = greeted or line.rstrip().endswith(far_end.GREETING.encode())
        except msgspec.DecodeError as error:
            self.problem = f"it sends what is no message: {error}"
        except OSError as error:  # the code that it is to get cannot be read
            self.problem = str(error)
        self._outgoing.put(b"")
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(_END_S)
        _signal(client, signal.SIGKILL)  # what it has started may hold its standard error open
        errors.join(_END_S)
        self._lost(client.wait(), greeted)

    def _handle(self, message: far_end.FromHost) -> None:
        match message:
            case far_end.Ready():
                self.address = message.address
                match self._judge(self.host, message):
                    case None:
                        self._is_up()
                    case str(problem):
                        self._refuse(problem)
                    case unpack:
                        with self._lock:
                            self._write(unpack)
            case far_end.Unpacked(problem=problem):
                if problem:
                    self._refuse(problem)
                else:
                    self._is_up()
            case far_end.ProcessLine(process=number, text=text):
                if (process := self._processes.get(number)) is not None:
                    process.output(text)
            case far_end.ProcessEnded():
                if (process := self._processes.pop(message.process, None)) is not None:
                    process.how = message.how

    def _is_up(self) -> None:
        with self._lock:
            self.up = True
            for message in self._waiting:
                self._write(message)
            self._waiting = []
        self._settled.set()

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        self.close()

    def _lost(self, status: int, greeted: bool) -> None:
        """The connection is gone, and with it all processes: the far end kills them when its input ends."""
        with self._lock:
            self.problem = self.problem or self._why(status, greeted)
            self.up, self._client, self._waiting = False, None, []
            self.failed_at = time.monotonic()
            lost, self._processes = self._processes, {}
        self._settled.set()
        how = Exit(128 + _LOST, _LOST.name, f"{self.host}: {self.problem}")
        for process in lost.values():
            process.how = how

    def _why(self, status: int, greeted: bool) -> str:
        """Return why the connection ended, from what the program has printed last."""
        said = self._errors[-1] if self._errors else f"the connection ended ({self._shell.name}'s status is {status})"
        if greeted or status == self._shell.failed:
            return said
        return f"{said} ({self._shell.hint})"


def _write_all(stream: IO[bytes], outgoing: queue.SimpleQueue[bytes]) -> None:
    """Write what comes, until b"". What cannot be written is dropped: its reader notices that the link is broken."""
    with contextlib.suppress(OSError), stream:
        while data := outgoing.get():
            stream.write(data)
            stream.flush()


def _signal(client: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the program and to what it has started. It leads a group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(client.pid, number)


def _started(argv: list[str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    # In a session of its own: Ctrl-C is for the launcher only
    with Explained(UsageError, f"{argv[0]} cannot be started", "; is it installed here?"):
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


_CONNECT_S = 30.0  # seconds in which the hosts must be ready when a run begins
_AGAIN_S = 20.0  # seconds after which a host that was gone is tried again, when a process is to be started
_ENDING_S = 10.0  # seconds in which the hosts may end their processes


class RemoteCluster(Cluster):
    """Starts processes on these hosts; a context manager that leaves none behind."""

    def __init__(self, plan: Launch, hosts: Sequence[Host], shell: RemoteShell, say: Callable[[str], None]) -> None:
        """`say` gets a sentence about each host that is left out. UsageError when the folders cannot be written."""
        self._hosts = tuple(host if host.python else replace(host, python=sys.executable) for host in hosts)
        if not self._hosts:
            raise UsageError("which machines? give --hosts a file with one host a line, or a list as a,b,c")
        self._say, self._bind = say, plan.bind
        self._sharing = FolderSharing(plan, self._hosts)
        folder, python, package = str(Path(plan.folder).resolve()), sys.executable, str(far_end.PACKAGE)
        self._links = {
            host: HostLink(
                host, shell,
                far_end.BeginHost(folder, host.folder or os.getcwd(), self._sharing.markers, python, package, HERE),
                self._sharing.judge,
            )
            for host in self._hosts
        }  # fmt: skip
        self._numbers = itertools.count(1)
        self._started: list[RemoteProcess] = []
        self._left_out: set[Host] = set()
        self._ended = False

    def __enter__(self) -> Self:
        """Connect to every host. Raises UsageError if the coordinator's cannot be used."""
        try:
            self._connect()
        except BaseException:
            self.end()
            raise
        return self

    def start(self, command: Command, output: Callable[[str], None]) -> RemoteProcess:
        """Start a process; see `Cluster.start`. Raises UsageError when no host takes its role."""
        if self._ended:
            raise UsageError("this cluster has been ended")
        # Those that have been away for a while are connected again: this process may be placed there
        for link in self._links.values():
            if link.up:
                self._left_out.discard(link.host)
            elif link.failed_at is not None:
                self._leave_out(link.host, link.problem)
                if time.monotonic() - link.failed_at > _AGAIN_S:
                    link.connect()
        self._started = [process for process in self._started if process.exit() is None]
        up = [host for host, link in self._links.items() if link.up]
        running: dict[Host, list[str]] = {host: [] for host in self._hosts}
        for started in self._started:
            running[started.link.host].append(started.command.role)
        host = place(command.role, self._hosts, up, running)
        if host is None:
            raise UsageError(f"{command.name} has no host: none in --hosts takes the role {command.role}")
        process = RemoteProcess(command, next(self._numbers), self._links[host], output)
        self._started.append(process)
        self._links[host].run(process)
        return process

    def end(self) -> None:
        self._ended = True
        for link in self._links.values():
            link.close()
        deadline = time.monotonic() + _ENDING_S
        for link in self._links.values():
            link.join(deadline)
        self._sharing.close()

    def _connect(self) -> None:
        deadline = time.monotonic() + _CONNECT_S
        for link in self._links.values():
            link.connect()
        first = coordinators_host(self._hosts)
        for host, link in self._links.items():
            if not link.settled(max(0.0, deadline - time.monotonic())):
                link.close()
            if link.up:
                continue
            why = link.problem or f"it was not ready within {_CONNECT_S:.0f} s"
            if host == first:
                raise UsageError(f"{host}, where the coordinator is to run, cannot be used: {why}")
            self._leave_out(host, why)
        address = self._links[first].address
        far = [link for link in self._links.values() if link.up and not is_loopback(link.address)]
        if self._bind.startswith(HERE) and is_loopback(address) and far:
            raise UsageError(
                f"{first} is reached at {address}, where {far[0].host} cannot connect to its coordinator: name it in "
                "--hosts by an address that all hosts can connect to"
            )

    def _leave_out(self, host: Host, why: str) -> None:
        if host not in self._left_out:
            self._left_out.add(host)
            self._say(f"{host} is left out: {why}; it is tried again now and then")


class FolderSharing:
    """Files in the run's folders by which a host shows that it sees them; a context manager that removes them."""

    def __init__(self, plan: Launch, hosts: tuple[Host, ...]) -> None:
        """Make them. Raises UsageError where a folder cannot be written."""
        self._coordinators = coordinators_host(hosts)
        self._folder = Path(plan.folder).resolve()
        self._snapshots = Path(plan.snapshots).resolve() if plan.snapshots and "://" not in plan.snapshots else None
        self._script, self._makes_certificates = plan.script, plan.tls == AUTO
        name = f".seen-{secrets.token_hex(8)}"
        folders = [self._folder, *([self._snapshots] if self._snapshots else [])]
        self.markers = tuple(str(folder / name) for folder in folders)
        try:
            for marker in self.markers:
                Path(marker).parent.mkdir(parents=True, exist_ok=True)
                Path(marker).touch()
        except OSError as error:
            self.close()
            raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        for marker in self.markers:
            Path(marker).unlink(missing_ok=True)

    def judge(self, host: Host, ready: far_end.Ready) -> str | far_end.Unpack | None:
        """Return why a host cannot be used, or what it has to unpack, or None."""
        if ready.problem:
            return ready.problem
        sees = dict(zip(self.markers, ready.sees, strict=False))
        writes = host.takes("server") or host == self._coordinators
        if self._snapshots and writes and not sees.get(self.markers[1], False):
            return (
                f"it does not see {self._snapshots}, where the snapshots would be: give --snapshots a URL "
                "(s3://...), or a folder that all hosts share, or none"
            )
        if sees.get(self.markers[0], False):
            return None
        if self._makes_certificates:
            return f"it does not see {self._folder}, where the certificates of --tls auto are: give --tls FOLDER"
        if not self._script:
            return None
        return far_end.Unpack(archived(self._folder))


def archived(folder: Path) -> bytes:
    """Return the copy of the script and its modules that the run keeps, as a tar archive."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        tar.add(folder / CODE, CODE)
    return written.getvalue()


SSH_OPTIONS = (
    "BatchMode=yes",  # ask nobody for a password
    "ConnectTimeout=10",
    "ServerAliveInterval=3",  # a machine that has died is noticed within 9 s
    "ServerAliveCountMax=3",
    "EscapeChar=none",
    "ControlPath=none",  # a shared connection has others' signs of life
)
_OWN_FAILURE = 255


class SshCluster(RemoteCluster):
    """Starts processes on the plan's hosts; a context manager that leaves none behind."""

    def __init__(self, plan: Launch, say: Callable[[str], None]) -> None:
        """`say`: see `RemoteCluster`. Raises UsageError without hosts, or when the folders cannot be written."""
        hint = "write python=PATH after the host, if Rallypoint is in another Python there"
        shell = RemoteShell("ssh", ssh_command, _OWN_FAILURE, hint)
        super().__init__(plan, plan.hosts, shell, say)


def ssh_command(host: Host) -> list[str]:
    """Return the command that starts the far end on a host."""
    options = [word for option in SSH_OPTIONS for word in ("-o", option)]
    port = ["-p", str(host.port)] if host.port else []
    program = shlex.join([host.python, "-P", "-m", FAR_END])
    return ["ssh", "-T", *options, *port, "--", host.name, f"exec {program}"]
