"""Processes on this machine: the cluster of ``rallypoint run``.

Every process runs in its own session. So Ctrl-C reaches only the launcher, which ends the others by pid. When the
launcher is killed, a `Guard` ends them all, with what they have started. Each role also holds the read end of a pipe
(`lifeline`), which breaks then: so it exits even if the guard was killed too.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rallypoint.errors import Explained, UsageError
from rallypoint.launch import environment
from rallypoint.launch.engines.cluster import VISIBLE, Cluster, Command, Exit, least_used
from rallypoint.launch.engines.guard import Guard

SUGGESTION = (
    "probably for lack of memory (the kernel's count of such kills has risen): use fewer processes, a smaller batch, "
    "or a machine or container with more memory"
)
_ROOT, _SELF, _SYSTEM = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")
_CHUNK = 64 << 10  # bytes of output that are read at once
_OUTPUT_S = 2.0  # seconds to wait for the last lines of a process that has ended
_MOST_LATE = 17  # chunks that a pipe holds at most (/proc/sys/fs/pipe-max-size), and the one that was being read
_MOMENT_S = 0.05  # the same, before others are looked after


class LocalProcess:
    """A process on this machine; see `Handle`."""

    def __init__(
        self, command: Command, output: Callable[[str], None], lifeline: int, guard: Guard, memory: MemoryKills,
        gpu: str | None = None,
    ) -> None:  # fmt: skip
        """`gpu` is the only one that it sees ("": it sees none); None: all that this process sees."""
        self.command, self.gpu, self._guard = command, gpu, guard
        self._memory, self._killed_by_us, self._reason = memory, False, ""
        self._output, own = passed_on(command.name, output), {} if gpu is None else {VISIBLE: gpu}
        with Explained(UsageError, f"{command.name} cannot be started: {command.argv[0]}"):
            self.process = subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, **own, **command.env, environment.LIFELINE: str(lifeline)},
                pass_fds=(lifeline,), start_new_session=True,
            )  # fmt: skip
        self._ended_at: float | None = None  # when it was found to have ended
        self._passing = self._given_up = False  # lines are being passed on; its last ones are not waited for any more
        self._late = 0  # chunks of output that were read after its end
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"output of {command.name}", daemon=True)
        try:
            self._reader.start()
        except RuntimeError as error:  # for want of threads
            self.process.kill()
            self.process.communicate()
            raise UsageError(f"{command.name} cannot be started: {error}") from None
        guard.watch(self.process.pid)

    def exit(self) -> Exit | None:
        """Return None while the process runs, and while its last lines are being passed on; see `Handle.exit`."""
        code = self.process.poll()
        if code is None:
            return None
        with self._lock:
            if self._ended_at is None:
                self._ended_at = time.monotonic()
                if code == -signal.SIGKILL and not self._killed_by_us and self._memory.one_more():
                    self._reason = SUGGESTION
                self._signal_group(signal.SIGKILL)  # its children would live on and hold its output open
                self._guard.forget(self.process.pid)
                self._reader.join(_MOMENT_S)
        # Not all that it has printed may be passed on. (A child in another session may hold the output.)
        last = time.monotonic() - self._ended_at < _OUTPUT_S or (self._passing and self._late <= _MOST_LATE)
        if self._reader.is_alive() and not self._given_up and last:
            return None  # (who asks may be the one who shows them)
        name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")  # (not all have names)
        return Exit(code) if code >= 0 else Exit(128 - code, name, self._reason)

    def signal(self, number: int) -> None:
        """Send a signal to the process and to its children."""
        self._killed_by_us = self._killed_by_us or number == signal.SIGKILL
        if self.process.poll() is None:
            self._signal_group(number)

    def wait(self, patience: float | None = None) -> Exit:
        """Wait until the process has ended, and for its last lines, but not longer than `patience` seconds."""
        self.process.wait()
        deadline = None if patience is None else time.monotonic() + patience
        while (ended := self.exit()) is None:
            self._reader.join(_MOMENT_S)
            self._given_up = deadline is not None and time.monotonic() >= deadline
        return ended

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _read(self) -> None:
        assert isinstance(self.process.stdout, io.BufferedReader)
        lines = Lines()
        with self.process.stdout as stream:
            while data := stream.read1(_CHUNK):
                self._pass_on(lines.feed(data))
            self._pass_on(lines.rest())

    def _pass_on(self, lines: list[str]) -> None:
        self._passing = True
        self._late += self._ended_at is not None
        for line in lines:
            self._output(line)
        self._passing = False


class LocalCluster(Cluster):
    """Starts processes on this machine; a context manager that leaves none behind.

    `folder` is deleted when the cluster ends, or this process; "": none. Of several `gpus` (see `devices_of`) each
    worker sees one: that which the fewest workers that run see. A group of ranks sees all, and other roles none.
    """

    def __init__(self, folder: str = "", gpus: Sequence[str] = ()) -> None:
        self._started: list[LocalProcess] = []
        self._gpus = gpus
        self._guard = Guard(folder) if folder else None
        self._lifeline: tuple[int, int] | None = os.pipe()
        self._memory = MemoryKills()

    def start(self, command: Command, output: Callable[[str], None]) -> LocalProcess:
        """Start a process; see `Cluster.start`. Raises UsageError when there is no such program."""
        if self._lifeline is None:
            raise UsageError("this cluster has been ended")
        self._guard = self._guard or Guard()
        self._started = [process for process in self._started if process.exit() is None]
        gpu = None if command.role == "worker" else ""  # others compute on processors, and would take some of it
        if command.role == "worker" and not command.group and len(self._gpus) > 1:
            gpu = least_used(self._gpus, [process.gpu for process in self._started])
        process = LocalProcess(command, output, self._lifeline[0], self._guard, self._memory, gpu)
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.signal(signal.SIGKILL)
        for process in self._started:
            process.wait(_OUTPUT_S)
        for fd in self._lifeline or ():
            os.close(fd)
        self._lifeline = None
        if self._guard is not None:
            self._guard.close()


class MemoryKills:
    """Counts the kills for lack of memory in this process's cgroup, or, where that has no counter, on this machine.

    `file` has a line ``oom_kill N``; None: there is no such file here.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or counter_file()
        self._known = self._count()

    def one_more(self) -> bool:
        """True if there was a kill that no earlier call has answered True for."""
        risen = self._count() > self._known
        self._known += risen
        return risen

    def _count(self) -> int:
        return 0 if self._file is None else _oom_kills(self._file) or 0


def counter_file(root: Path = _ROOT, own: Path = _SELF, system: Path = _SYSTEM) -> Path | None:
    """The nearest file that counts kills for lack of memory: of our cgroup (version 2, then 1), or of the machine."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        groups = []
    candidates = [root / path.lstrip("/") / "memory.events" for _, kinds, path in groups if not kinds]
    candidates += [root / "memory.events"]  # a container may see its own cgroup as the root
    for _, kinds, path in groups:
        if "memory" in kinds.split(","):
            folders = root / "memory" / path.lstrip("/"), root / "memory"
            candidates += [folder / "memory.oom_control" for folder in folders]
    return next((file for file in [*candidates, system] if _oom_kills(file) is not None), None)


def _oom_kills(file: Path) -> int | None:
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return None
    return next((int(words[1]) for words in lines if len(words) == 2 and words[0] == "oom_kill"), None)


log = logging.getLogger("rallypoint")

LONGEST = 1 << 20  # bytes of a line; a longer one comes in pieces, because nobody knows whether it ever ends
MOST = 1 << 20  # characters that wait; a line is never split, so one more of the longest may


class LineRelay:
    """Lines of all processes, in the order in which they came. Any thread may `put`; one thread takes.

    While too much waits, who puts waits too. So a process that prints faster than its lines can be shown is held up by
    its pipe, as it would be by a terminal, and no line is lost. What is put `first` waits for no room, and is taken
    before the lines that wait.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._lines: deque[tuple[str, str]] = deque()
        self._first: deque[tuple[str, str]] = deque()
        self._size, self._open = 0, False

    def __len__(self) -> int:
        return len(self._first) + len(self._lines)

    def put(self, process: str, line: str, *, first: bool = False) -> None:
        """Add a line that `process` has printed, once there is room; `first`: at once."""
        with self._changed:
            self._changed.wait_for(lambda: first or self._open or self._size < self._most)
            (self._first if first else self._lines).append((process, line))
            self._size += len(line) + 1

    def take(self) -> tuple[str, str]:
        """Take the next line: the process, and what it has printed. IndexError if none waits."""
        with self._changed:
            process, line = (self._first or self._lines).popleft()
            self._size -= len(line) + 1
            self._changed.notify_all()
            return process, line

    def open(self) -> None:
        """From now on nobody waits: the processes are about to be killed, and nobody may take any more."""
        with self._changed:
            self._open = True
            self._changed.notify_all()


def passed_on(process: str, output: Callable[[str], None]) -> Callable[[str], None]:
    """Return `output`, but raising nothing: who reads the lines of `process` has to read on, else it could not print.

    The first error is logged; lines that cannot be passed on are dropped.
    """
    failed = False

    def pass_on(line: str) -> None:
        nonlocal failed
        try:
            output(line)
        except Exception as error:  # of whatever kind: it is the error of whoever shows lines
            if not failed:
                failed = True
                log.error("lines of %s cannot be passed on: %r", process, error)

    return pass_on


class Lines:
    """The lines of one process, each as a terminal shows it in the end: a ``\\r`` begins the line anew.

    So a progress bar, which may be written a million times without a newline, takes no more memory than one of its
    states.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take the next bytes. Returns the lines that are complete now, without their ends."""
        *whole, rest = (self._rest + data).split(b"\n")
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        pieces = [rest[at : at + LONGEST] for at in range(0, len(rest), LONGEST)] or [b""]
        self._rest = pieces.pop()
        return [_shown(line) for line in (*whole, *pieces)]

    def rest(self) -> list[str]:
        """Nothing more comes. Returns the last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return [_shown(rest)] if rest else []


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
