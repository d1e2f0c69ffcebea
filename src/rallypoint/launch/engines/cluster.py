"""The interface between the supervisor and the place where processes run: local processes, ssh, Slurm, Ray, ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from signal import Signals
from typing import ClassVar, Protocol

from rallypoint.errors import StartAgain


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process to start: ``Command(name="server0", role="server", argv=("python", "-P", ...), env={"A": "1"})``.

    Attributes:
        name: unique among all processes of the run.
        role: "coordinator", "server", "aggregator" or "worker". A cluster may place the roles on different machines.
        argv: the program and its arguments.
        env: environment variables that the process gets in addition to those that the cluster gives every process.
            Tokens may be among them: they are never shown.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: with a status, or by a signal (``Exit(137, "SIGKILL")``).

    Attributes:
        status: 0 to 255; 128 plus its number after a signal.
        signal: the signal's name; "" when the process ended by itself.
        reason: what else the cluster knows, as a phrase ("out of memory", "preempted"); often "".
        again: it has asked for another process in its place (`StartAgain`).
        started: False if it could not be started; the reason says why.
    """

    status: int
    signal: str = ""
    reason: str = ""
    again: bool = False
    started: bool = True

    @property
    def died(self) -> bool:
        """True if something outside ended the process, or it has asked for another one. Then it makes sense to start
        another one."""
        return bool(self.signal) or self.again

    def having_asked(self, asked: bool) -> Exit:
        """This exit, of a process that has printed `StartAgain.LINE` (`asked`), or has not."""
        return replace(self, again=True) if asked and self.status == StartAgain.STATUS else self

    def __str__(self) -> str:
        """Return the end of a sentence that begins with the process's name."""
        what = f"was killed ({self.signal})" if self.signal else f"ended with status {self.status}"
        what = what if self.started else "could not be started"
        return f"{what}: {self.reason}" if self.reason else what


class Handle(Protocol):
    """One started process. Its methods may be called from any thread."""

    @property
    def command(self) -> Command:
        """The command that was started."""

    def exit(self) -> Exit | None:
        """Return None while the process runs, afterwards how it ended.

        By then `output` has received all of its lines, and the processes that it had started have been ended.
        """

    def signal(self, number: int) -> None:
        """Send a signal to the process and to the processes that it started. Does nothing when it has ended."""


class Cluster(Protocol):
    """Starts processes and ends them. Implementations pass `rallypoint.testing.contracts.cluster`.

    Those that inherit it are not asked to run it again; one whose machines are lent for a time says otherwise.

    Attributes:
        notices: the signals after which the engine is asked to run the launcher again: see `run_again`.

    An implementation over ssh in ten lines (`_Remote`, its handle, wraps `subprocess.Popen`)::

        class RemoteCluster(Cluster):
            def __init__(self, hosts):
                self._hosts, self._started = itertools.cycle(hosts), []

            def start(self, command, output):
                env = [f"{name}={value}" for name, value in command.env.items()]
                argv = ["ssh", "-tt", next(self._hosts), shlex.join(["env", *env, *command.argv])]
                self._started.append(_Remote(command, argv, output))
                return self._started[-1]

            def end(self):
                for process in self._started:
                    process.signal(signal.SIGKILL)
                    process.wait()
    """

    notices: ClassVar[tuple[Signals, ...]] = ()

    @classmethod
    def run_again(cls) -> str:
        """Ask the engine to run this job again, after a notice. Returns what to tell the user, "" if nothing.

        By then the cluster has ended. The engine may end this process.
        """
        return ""

    def start(self, command: Command, output: Callable[[str], None]) -> Handle:
        """Start a process and return at once.

        `output` is called with each line that it prints (standard output and standard error, without the newline), from
        a thread of the cluster. Raises RallypointError when it cannot be started.
        """

    def end(self) -> None:
        """Kill every process that still runs, and wait until all have ended. May be called twice."""
