"""One host of a `RemoteCluster`: the program that leads there (`RemoteShell`), and the processes that run behind it.

    idle --connect()--> connecting --Ready, Unpacked--> up --the connection ends--> idle
                            |                                                        ^
                            +---------- refused, unreachable, not usable ------------+

Each host has one connection, whatever runs there. So a host that dies is one event, and many processes need no more
logins than one (sshd refuses some of those that come at once). What is to run there while the link is connecting
starts when it is up.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, BinaryIO

import msgspec

from rallypoint.errors import UsageError
from rallypoint.launch.engines.cluster import Command, Exit
from rallypoint.launch.engines.relay import passed_on
from rallypoint.launch.engines.remote.hosts import Host
from rallypoint.launch.engines.remote.messages import (
    GREETING,
    Begin,
    Ended,
    FromHost,
    Line,
    Ready,
    Run,
    Signal,
    ToHost,
    Unpack,
    Unpacked,
)

FAR_END = "rallypoint.launch.engines.remote.far_end"
_LOST = signal.SIGHUP  # how a process ends whose connection is gone
_LONGEST = 64 << 10  # bytes of a line of the program; a longer one comes in pieces
_END_S = 5.0  # seconds in which a host may end its processes and say so


@dataclass(frozen=True, slots=True)
class RemoteShell:
    """The program that leads to a host, starts the far end there, and carries what both say.

    Attributes:
        name: of the program, for sentences.
        command: returns its command line for a host.
        failed: the exit status by which it says that it has failed itself, and not the far end; None if it has none.
        hint: what to do if there is no Rallypoint on a host.
    """

    name: str
    command: Callable[[Host], list[str]]
    failed: int | None
    hint: str


class RemoteProcess:
    """A process on another machine; see `Handle`."""

    def __init__(self, command: Command, number: int, link: HostLink, output: Callable[[str], None]) -> None:
        self.command, self.link = command, link
        self.number, self.output = number, passed_on(command.name, output)
        self._exit: Exit | None = None

    @property
    def host(self) -> Host:
        """The machine that it runs on."""
        return self.link.host

    def exit(self) -> Exit | None:
        """Return None while the process runs; see `Handle.exit`."""
        return self._exit

    def signal(self, number: int) -> None:
        """Send a signal to the process and to its children."""
        if self._exit is None:
            self.link.send(Signal(self.number, number))

    def ended(self, how: Exit) -> None:
        """Note how it ended."""
        self._exit = how


class HostLink:
    """The connection to one host. Its methods may be called from any thread."""

    def __init__(
        self, host: Host, shell: RemoteShell, begin: Begin, judge: Callable[[Host, Ready], str | Unpack | None]
    ) -> None:  # fmt: skip
        """`judge` returns why a host that is ready cannot be used, or what it has to unpack, or None."""
        self.host, self._begin, self._judge = host, begin, judge
        self._shell = shell
        self._lock = threading.RLock()
        self._client: subprocess.Popen[bytes] | None = None
        self._outgoing = queue.SimpleQueue[bytes]()
        self._threads: list[threading.Thread] = []
        self._waiting: list[ToHost] = []  # for the link to be up
        self._processes: dict[int, RemoteProcess] = {}
        self._settled = threading.Event()  # up, or failed
        self._errors: list[str] = []
        self._problem = ""
        self.address = ""
        self.up = False
        self.failed_at: float | None = None  # on the clock of time.monotonic; None while there is hope

    @property
    def problem(self) -> str:
        """Why there is no connection, as a phrase; "" while there is one."""
        return self._problem

    def connect(self) -> None:
        """Begin to connect, and return at once. Does nothing if that is done, or under way.

        Raises UsageError if there is no such program.
        """
        with self._lock:
            if self._client is not None:
                return
            self._settled.clear()
            self._errors, self._problem, self.failed_at = [], "", None
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
        command = process.command
        with self._lock:  # so that the link cannot be lost in between
            self.connect()
            self._processes[process.number] = process
            self.send(Run(process.number, command.name, command.role, command.argv, dict(command.env)))

    def send(self, message: ToHost) -> None:
        """Send a message, now or as soon as the link is up. Without a link it is dropped."""
        with self._lock:
            if self.up:
                self._write(message)
            elif self._client is not None:
                self._waiting.append(message)

    def close(self) -> None:
        """End the input of the far end, which kills its processes. Returns at once; see `join`."""
        with self._lock:
            self._end_input()
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

    def _write(self, message: ToHost) -> None:
        """Write to the host, on the writer's thread: a host that hangs reads nothing. The lock is held."""
        self._outgoing.put(msgspec.json.encode(message) + b"\n")

    def _end_input(self) -> None:
        """End the input of the far end."""
        self._outgoing.put(b"")

    def _note_errors(self, lines: BinaryIO) -> None:
        with lines:
            while line := lines.readline(_LONGEST):
                if text := line.decode(errors="replace").strip():
                    self._errors = [*self._errors[-9:], text]

    def _read(self, client: subprocess.Popen[bytes], stream: BinaryIO, errors: threading.Thread) -> None:
        decoder = msgspec.json.Decoder[FromHost](FromHost)
        greeted = False
        try:
            with stream:
                for line in stream:
                    if greeted:
                        self._handle(decoder.decode(line))
                    greeted = greeted or line.rstrip().endswith(GREETING.encode())
        except msgspec.DecodeError as error:
            self._problem = f"it sends what is no message: {error}"
        except OSError as error:  # the code that it is to get cannot be read
            self._problem = str(error)
        self._end_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(_END_S)
        _signal(client, signal.SIGKILL)  # what it has started may hold its standard error open
        errors.join(_END_S)
        self._lost(client.wait(), greeted)

    def _handle(self, message: FromHost) -> None:
        match message:
            case Ready():
                self.address = message.address
                match self._judge(self.host, message):
                    case None:
                        self._is_up()
                    case str(problem):
                        self._refuse(problem)
                    case unpack:
                        with self._lock:
                            self._write(unpack)
            case Unpacked(problem=problem):
                if problem:
                    self._refuse(problem)
                else:
                    self._is_up()
            case Line(process=number, text=text):
                if (process := self._processes.get(number)) is not None:
                    process.output(text)
            case Ended():
                if (process := self._processes.pop(message.process, None)) is not None:
                    process.ended(Exit(message.status, message.signal, message.reason, started=message.started))

    def _is_up(self) -> None:
        with self._lock:
            self.up = True
            for message in self._waiting:
                self._write(message)
            self._waiting = []
        self._settled.set()

    def _refuse(self, problem: str) -> None:
        self._problem = problem
        self.close()

    def _lost(self, status: int, greeted: bool) -> None:
        """The connection is gone, and with it all processes: the far end kills them when its input ends."""
        with self._lock:
            self._problem = self._problem or self._why(status, greeted)
            self.up, self._client, self._waiting = False, None, []
            self.failed_at = time.monotonic()
            lost, self._processes = self._processes, {}
        self._settled.set()
        how = Exit(128 + _LOST, _LOST.name, f"{self.host}: {self._problem}")
        for process in lost.values():
            process.ended(how)

    def _why(self, status: int, greeted: bool) -> str:
        """Return why the connection ended, from what the program has printed last."""
        said = self._errors[-1] if self._errors else f"the connection ended ({self._shell.name}'s status is {status})"
        if greeted or status == self._shell.failed:
            return said
        return f"{said} ({self._shell.hint})"


def _write_all(stream: IO[bytes], outgoing: queue.SimpleQueue[bytes]) -> None:
    """Write what comes, until b"". What cannot be written is dropped: the connection is broken, as its reader notices.
    """
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
    try:  # in a session of its own: Ctrl-C is for the launcher only
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be started: {error.strerror}; is it installed here?") from None
