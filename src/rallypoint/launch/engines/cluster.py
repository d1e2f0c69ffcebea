"""The interface between the supervisor and the place where processes run: local processes, ssh, Slurm, Ray, ..."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from signal import Signals
from typing import ClassVar, Protocol, Self

from rallypoint.errors import StartAgain, UsageError, meant
from rallypoint.launch.plan import Launch

GROUP = "rallypoint.launch.engines.ranks"  # the program of a worker of several ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process to start: ``Command(name="server0", role="server", argv=("python", "-P", ...), env={"A": "1"})``."""

    name: str  # unique among all processes of the run
    role: str  # "coordinator", "server", "aggregator" or "worker". A cluster may place the roles on different machines.
    argv: tuple[str, ...]  # the program and its arguments
    # Environment variables that the process gets in addition to those that the cluster gives every process. Tokens may
    # be among them: they are never shown.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def group(self) -> bool:
        """A worker of several ranks: it takes its share of the GPUs by itself."""
        return GROUP in self.argv


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: with a status, or by a signal (``Exit(137, "SIGKILL")``)."""

    status: int  # 0 to 255; 128 plus its number after a signal
    signal: str = ""  # the signal's name; "" when the process ended by itself
    reason: str = ""  # what else the cluster knows, as a phrase ("out of memory", "preempted"); often ""
    again: bool = False  # it has asked for another process in its place (`StartAgain`)
    started: bool = True  # False if it could not be started; the reason says why

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
    """Starts processes and ends them. Implementations pass `tests/support/cluster_contract.py`.

    Those that inherit it are not asked to run it again; one whose machines are lent for a time says otherwise.

    A new engine: its name in `ENGINES`, a case in `cluster_of`, and what a plan needs of it in
    `RunOptions._machines` (launch/options.py). On other machines it replaces `plan.HERE` in each argument by the
    address of the machine, and hands tokens over by stdin or a file, not in arguments (`ps` shows those).

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

    def __enter__(self) -> Self:
        """In the body processes may be started; at its end none is left."""
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

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


ENGINES = {  # the class of each one's clusters, below this package
    "local": "local:LocalCluster", "ray": "ray:RayCluster", "slurm": "slurm:SlurmCluster", "ssh": "remote:SshCluster",
}  # fmt: skip


def check_engine(name: str) -> None:
    """Raise UsageError unless there is an engine of this name."""
    if name not in ENGINES:
        known = f"; the engines are {', '.join(ENGINES)}"
        raise UsageError(f"there is no engine {name}{meant(name, ENGINES) or known}")


def kind_of(engine: str) -> type[Cluster]:
    """Return the class of this engine's clusters. Raises UsageError if there is no such engine."""
    check_engine(engine)
    kind: type[Cluster] = resolve_name(f"{__package__}.{ENGINES[engine]}")
    return kind


def cluster_of(plan: Launch, say: Callable[[str], None]) -> Cluster:
    """Return the cluster that the plan names, to be entered.

    `say` gets a sentence about each machine that cannot be used.
    """
    kind: Callable[..., Cluster] = kind_of(plan.engine)
    match plan.engine:
        case "ray":
            return kind(
                plan.address or "auto", folder=plan.folder, snapshots=plan.snapshots, servers=plan.servers,
                cpus=plan.threads_at_first, gpus=plan.gpus, say=say,
            )  # fmt: skip
        case "local":
            return kind(gpus=devices_of(os.environ))
    return kind(plan, say)


VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


class GpuShare:
    """A worker's share of the GPUs of its machine, held while this process lives (or until `close`).

    Workers of one job on one machine find each other by names of sockets (Linux's abstract ones: no files, and the
    name is free as soon as the process has died). Example: 8 GPUs and 4 ranks: the first worker sees "0,1,2,3", the
    second "4,5,6,7".
    """

    def __init__(self, ranks: int, job: str, devices: Sequence[str]) -> None:
        """`job` is any text that is the same for the workers of one job; `devices` are those of `devices_of`."""
        # For CUDA_VISIBLE_DEVICES; None: leave it as it is, since there are no GPUs, or fewer than ranks
        self.visible: str | None = None
        self.shared = False  # all shares are taken, so this one is another worker's too
        self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        shares = shares_of(devices, ranks)
        if not shares:
            return
        place = hashlib.sha256(f"{job} {ranks} {','.join(devices)}".encode()).hexdigest()[:32]
        for number, share in enumerate(shares):
            try:
                self._name.bind(f"\0rallypoint-{os.getuid()}-{place}-{number}")
            except OSError:  # another worker has it
                continue
            self.visible = ",".join(share)
            return
        self.visible, self.shared = ",".join(shares[0]), True

    def close(self) -> None:
        """Give the share back."""
        self._name.close()


def shares_of(devices: Sequence[str], ranks: int) -> list[list[str]]:
    """Return the parts of `devices` that workers of so many ranks get; GPUs that are left over belong to none."""
    return [list(devices[at : at + ranks]) for at in range(0, len(devices) - ranks + 1, ranks)]


def least_used(devices: Sequence[str], used: Sequence[str | None]) -> str:
    """Return the first of the devices that is least often among `used`."""
    return min(devices, key=used.count)


def devices_of(environment: Mapping[str, str], driver: Path = _DRIVER) -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them; without it, those of the driver."""
    if (text := environment.get(VISIBLE)) is not None:
        return [one.strip() for one in text.split(",") if one.strip()]
    return [str(number) for number in range(len(list(driver.glob("*"))))]
