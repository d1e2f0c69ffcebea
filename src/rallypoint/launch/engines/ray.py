"""Processes on the nodes of a Ray cluster, each supervised by an actor on its node (`NodeProcess`).

Ray chooses the nodes, counts CPUs and GPUs, and tells which node is gone or about to go. Nothing of the job itself
passes through Ray: the processes have sockets of their own.

=============  =========================================================================================
coordinator    on the driver's node: beside the run's folder, and it cannot be lost without the driver
servers        in one placement group with SPREAD: on as many nodes as there are, and the room of one that
               dies is kept for the next. Those that a resize adds, and those that leave a node that is
               about to go (its part of the group stays there), have the strategy SPREAD
others         strategy SPREAD: a node that is lost takes few workers with it
=============  =========================================================================================

While a server waits for room, no worker does: otherwise those that waited before could take all the room that comes.

No actor is restarted by Ray: the `Supervisor` starts another process, which may have other arguments. None is detached:
all end with the driver, as when `ray job stop` ends it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.errors import Explained, RallypointError, UsageError, to_install
from rallypoint.launch import runner
from rallypoint.launch.engines.cluster import Cluster, Command, Exit
from rallypoint.launch.engines.far_end import unpacked
from rallypoint.launch.engines.local import LocalCluster, LocalProcess, passed_on
from rallypoint.launch.engines.remote import archived
from rallypoint.launch.kept_code import CODE
from rallypoint.launch.plan import HERE
from rallypoint.net.tcp import split_address

PATIENCE_S = 10.0  # seconds until `more` answers that there is nothing new
_LINES, _AT_ONCE = 10_000, 1_000  # lines that wait for the driver before the process has to, and those of one answer
_NOT_STARTED = 127  # the status that a shell gives for a program that is not there


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What a node has to know of the machine that started the run: paths that may be others here."""

    node: str  # the Ray node of the driver
    python: str  # its interpreter
    runner: str  # its copy of `rallypoint.launch.runner`
    cwd: str  # its current folder. Where a node has it too, processes run in it.
    code: str = ""  # the folder of the code that the run has kept; "" if there is none
    # A file among the run's snapshots; "" if they are no folder. A node that has it shares that folder.
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
    """The actor: one process on this node. The process, and all that it starts, end with the actor at the latest.

    Lines and the exit go to the driver when it asks for `more`. It needs no Ray itself.
    """

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

        `code`: the run's code as a tar archive. A command that cannot be started ends at once, with a line about it.
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
        elsewhere = bool(code) and driver.node != self._node
        try:
            folder = tempfile.mkdtemp(prefix="rallypoint-") if elsewhere else ""
            self._cluster = LocalCluster(folder)  # which deletes it
            if elsewhere and (why := unpacked(code, Path(folder))):
                self._refuse(f"on the node {self._address}: {why}")
                return
            if os.path.isdir(driver.cwd):
                os.chdir(driver.cwd)
            argv = argv_here(command, driver, address=self._address, code=f"{folder}/{CODE}" if elsewhere else "")
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


GONE, DRAINED, LOST = "its node is gone", "its node is about to go", "its Ray actor is gone"
_ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.1  # seconds until a process that was just started is looked after
_LOOK_S = 1.0  # seconds between looks at draining nodes, and at processes that wait for room
_WAITS_S = 5.0  # seconds after which a process that waits for room is named
_AGAIN_S = 1.0  # seconds until an actor that could not be reached is asked again
_END_S = 10.0  # seconds in which killed processes report their exits
NAMESPACE = "rallypoint"
_CONNECT_S = 10.0


def ray_module() -> Any:
    """Return Ray. Raises UsageError when it is not installed."""
    try:
        import ray
        import ray.util
        import ray.util.placement_group
    except ImportError:
        raise UsageError(f"there is no Ray here: {to_install('ray')}") from None
    return ray


def connect(address: str) -> None:
    """Connect to a Ray cluster, or start one. Ray's own handler of SIGTERM is not left in place.

    Raises UsageError if there is none, or the address is of no use.
    """
    ray = ray_module()
    _check(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}
    with _own_handlers():
        try:
            if address == "local":
                options["include_dashboard"] = False
            ray.init(address=address, **options)
        except ray.exceptions.AuthenticationError as error:
            raise UsageError(
                "the Ray cluster wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN unless it is in "
                f"~/.ray/auth_token ({str(error).splitlines()[0]})"
            ) from None
        except ConnectionError:
            raise UsageError(_none(address)) from None


def _check(address: str) -> None:
    """Raise UsageError unless the address may be a cluster's. Ray itself tries for minutes, without a word."""
    if address in ("auto", "local"):
        return
    if "://" in address:
        raise UsageError(f"--address {address}: Ray Client is not supported; `ray job submit` runs this on the cluster")
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        raise UsageError(f"{_none(address)} ({error.strerror or error})") from None


def _none(address: str) -> str:
    where = "on this machine" if address == "auto" else f"at {address}"
    return f"there is no Ray cluster {where}: start one with `ray start --head`, or add --address local"


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """In the body Ray may set handlers of signals; afterwards they are as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RayProcess:
    """A process on a node of Ray; see `Handle`."""

    def __init__(self, command: Command, output: Callable[[str], None]) -> None:
        self.command, self.output = command, passed_on(command.name, output)
        self.actor: Any = None  # None: Ray has not been asked for it yet
        self.answer: Any = None  # what the actor was asked last
        self.begun: Begun | None = None  # where it runs; None as long as Ray has found no room for it
        self.taken = 0  # lines that have come
        self.asked_at, self.named = time.monotonic(), False
        self.drained = False
        self._exit: Exit | None = None

    def exit(self) -> Exit | None:
        """Return None while the process runs, or waits for room; see `Handle.exit`."""
        return self._exit

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children. One that waits for room is given up, if that would end it."""
        if self._exit is not None:
            return
        actor = self.actor
        if self.begun is not None and actor is not None:
            actor.signal.remote(number)
        elif self.begun is None and number in _ENDING:
            self.ended(Exit(128 + number, signal.Signals(number).name, "it waited for room in the Ray cluster"))

    def ended(self, how: Exit) -> None:
        """It has ended: let Ray have its resources back."""
        self._exit = self._exit or how
        self.withdraw()

    def withdraw(self) -> None:
        """End the actor, if there is one."""
        ray, actor, self.actor, self.answer = ray_module(), self.actor, None, None
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)


class RayCluster(Cluster):
    """Starts processes on the nodes of a Ray cluster; a context manager that leaves none behind.

    >>> with RayCluster(gpus=1) as cluster:
    ...     cluster.start(command, print)
    """

    def __init__(
        self, address: str = "auto", *, folder: str = "", snapshots: str = "", servers: int = 0, cpus: float = 1.0,
        gpus: float = 0.0, say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        """Connect to the Ray cluster at `address`, unless this process is connected already.

        address: ``auto`` is the cluster that this machine belongs to; ``local`` starts one on this machine, which ends
            with the run.
        folder: the run's folder. Nodes get the code that it has kept.
        snapshots: where the run's snapshots are. If that is a folder, nodes with servers have to see it.
        servers: for how many servers room is reserved together.
        cpus, gpus: what each worker needs. A server or an aggregator needs one CPU, the coordinator none.
        say: gets a sentence about processes for which Ray has no room yet; called from a thread.

        Raises UsageError when there is no Ray, or no such cluster.
        """
        ray = ray_module()
        self._own = not ray.is_initialized()
        if self._own:
            connect(address)
        context = ray.get_runtime_context()
        code = Path(folder) / CODE if folder else None
        self._driver = Driver(
            node=context.get_node_id(), python=sys.executable, runner=runner.__file__, cwd=os.getcwd(),
            code=str(code.resolve()) if code is not None else "", marker=_marker(snapshots),
        )  # fmt: skip
        # Two drivers may have run folders of one name, and, in containers, one process id
        self._run = f"{Path(folder).resolve().name or 'run'}-{secrets.token_hex(3)}"
        self._needs = {"worker": (cpus, gpus), "coordinator": (0.0, 0.0)}
        self._room = ray.util.placement_group(
            [{"CPU": 1.0}] * servers, strategy="SPREAD", name=f"rallypoint/{self._run}/servers"
        ) if servers else None  # fmt: skip
        self._servers, self._say = servers, say
        self._packed: Any = None
        self._names: Counter[str] = Counter()  # how often each name was given
        self._reserved: list[RayProcess] = []  # the servers in the placement group
        self._going: set[str] = set()  # the nodes that are about to go
        self._lock = threading.Lock()
        self._processes: list[RayProcess] = []  # replaced under the lock, read without
        self._said = ""
        self._ended = False
        self._looked = 0.0
        self._watch = threading.Thread(target=self._look_after, name="processes on Ray", daemon=True)
        self._watch.start()

    def start(self, command: Command, output: Callable[[str], None]) -> RayProcess:
        """Start a process; see `Cluster.start`. It waits until a node has room for it."""
        if self._ended:
            raise UsageError("this cluster has been ended")
        process = RayProcess(command, output)
        self._place(process)
        with self._lock:
            self._processes = [*self._processes, process]
        return process

    def end(self) -> None:
        """Kill every process that still runs, and wait until all have ended. Leaves the Ray cluster if it joined it."""
        if self._ended:
            return
        ray = ray_module()
        for process in self._processes:
            process.signal(signal.SIGKILL)
        deadline = time.monotonic() + _END_S
        while any(process.exit() is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        self._ended = True
        self._watch.join()
        for process in self._processes:
            process.ended(Exit(128 + signal.SIGKILL, "SIGKILL"))
        if self._driver.marker:
            Path(self._driver.marker).unlink(missing_ok=True)
        if self._room is not None:
            ray.util.remove_placement_group(self._room)
        if self._own:
            ray.shutdown()

    # ---- where ----

    def _place(self, process: RayProcess) -> None:
        """Ask Ray for an actor that starts this process."""
        ray, command = ray_module(), process.command
        cpus, gpus = self._needs.get(command.role, (1.0, 0.0))
        self._names[command.name] += 1
        again = f"#{n}" if (n := self._names[command.name]) > 1 else ""
        process.actor = ray.remote(NodeProcess).options(
            name=f"rallypoint/{self._run}/{command.name}{again}", namespace=NAMESPACE,
            num_cpus=cpus, num_gpus=gpus, max_concurrency=4, max_restarts=0,
            scheduling_strategy=self._strategy(process),
        ).remote()  # fmt: skip
        self._ask(process, process.actor)

    def _strategy(self, process: RayProcess) -> Any:
        from ray.util import scheduling_strategies as strategies

        if process.command.role == "coordinator":
            return strategies.NodeAffinitySchedulingStrategy(self._driver.node, soft=False)
        if process.command.role == "server" and self._has_room_reserved():
            self._reserved.append(process)
            return strategies.PlacementGroupSchedulingStrategy(self._room)
        return "SPREAD"

    def _has_room_reserved(self) -> bool:
        """Is there room in the placement group? A node that is about to go keeps its part of it until it is gone."""
        lost = [p for p in self._reserved if p.begun is not None and p.begun.node in self._going]
        self._reserved = [process for process in self._reserved if process.exit() is None or process in lost]
        return len(self._reserved) < self._servers

    def _code(self) -> Any:
        """Return the code that the run has kept, as Ray passes it on: it is the same for all workers."""
        if self._packed is None:
            there = bool(self._driver.code) and Path(self._driver.code).is_dir()
            self._packed = ray_module().put(archived(Path(self._driver.code).parent)) if there else b""
        return self._packed

    # ---- the thread that looks after the processes ----

    def _look_after(self) -> None:
        while not self._ended:
            try:
                self._look()
            except Exception as error:  # of any kind, when Ray's head does not answer: it may be back soon
                if (said := f"Ray does not answer: {str(error) or repr(error)}".splitlines()[0]) != self._said:
                    self._said = said
                    self._say(said)
                time.sleep(_AGAIN_S)

    def _look(self) -> None:
        asked = {process.answer: process for process in self._processes if process.answer is not None}
        if asked:
            for answer in ray_module().wait(list(asked), timeout=_POLL_S)[0]:
                self._answered(asked[answer], answer)
        else:
            time.sleep(_POLL_S)
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            with self._lock:  # else one that is being started would be lost
                self._processes = [process for process in self._processes if process.exit() is None]
            self._drain()
            self._servers_first()
            self._name_those_that_wait()

    def _answered(self, process: RayProcess, answer: Any) -> None:
        """The actor has answered, or is gone."""
        ray, actor = ray_module(), process.actor
        if actor is None or process.answer is not answer:
            return  # another thread has ended the process meanwhile
        try:
            news = ray.get(answer)
        except ray.exceptions.ActorUnavailableError:  # it may be back, or Ray finds out that it is gone
            time.sleep(_AGAIN_S)
        except ray.exceptions.RayError as error:
            process.ended(_how(process, error))
            return
        else:
            if isinstance(news, More):
                self._show(process, news)
            else:
                process.begun = news
        if process.exit() is None:
            self._ask(process, actor)

    def _ask(self, process: RayProcess, actor: Any) -> None:
        """Ask the actor for news, or first to start the process."""
        if process.begun is None:
            code = self._code() if process.command.role == "worker" else b""
            process.answer = actor.start.remote(process.command, self._driver, code)
        else:
            process.answer = actor.more.remote(process.taken)

    def _show(self, process: RayProcess, news: More) -> None:
        for number, line in enumerate(news.lines, news.first):
            if number >= process.taken:
                process.output(line)
                process.taken = number + 1
        if (how := news.exit) is not None:
            if process.drained and how.status == 0:
                how = Exit(128 + signal.SIGTERM, "SIGTERM", DRAINED)  # another one is wanted elsewhere
            process.ended(how)

    def _drain(self) -> None:
        """Tell the processes on nodes that are about to go to hand over and exit."""
        self._going = _draining()
        for process in self._processes:
            there = process.begun is not None and process.begun.node in self._going
            if there and not process.drained and process.command.role != "coordinator":
                process.drained = True
                process.signal(signal.SIGTERM)

    def _servers_first(self) -> None:
        """While a server waits for room, withdraw the workers that do; afterwards ask for them again."""
        waiting = [process for process in self._processes if process.begun is None and process.exit() is None]
        now = time.monotonic()
        held = any(p.command.role == "server" and now - p.asked_at > _LOOK_S for p in waiting)
        for process in waiting:
            if process.command.role == "worker" and held == (process.actor is not None):
                process.withdraw() if held else self._place(process)

    def _name_those_that_wait(self) -> None:
        now = time.monotonic()
        waiting = [p for p in self._processes if p.begun is None and now - p.asked_at > _WAITS_S]
        new = [process for process in waiting if not process.named]
        for process in waiting:
            process.named = True
        if new:
            names = ", ".join(process.command.name for process in new)
            cpus, gpus = self._needs.get(new[0].command.role, (1.0, 0.0))
            needs = f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
            each = " each" if len(new) > 1 else ""
            verb = "wait" if len(new) > 1 else "waits"
            self._say(f"{names} {verb} for room in the Ray cluster ({needs}{each})")


def _marker(snapshots: str) -> str:
    """Make a file among the snapshots by which a node sees that it shares their folder. "": they are no folder."""
    if not snapshots or "://" in snapshots:
        return ""
    folder = Path(snapshots).resolve()
    with Explained(UsageError, f"{snapshots} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        (marker := folder / f".seen-{secrets.token_hex(8)}").touch()
    return str(marker)


def _draining() -> set[str]:
    """Return the ids of the nodes that are about to go (a pre-emption notice, `ray drain-node`, the autoscaler)."""
    import ray._private.state as state  # Ray's own libraries ask here too; there is no public way

    return set(state.state.get_draining_nodes())


def _how(process: RayProcess, error: Exception) -> Exit:
    """Return how a process has ended whose actor is gone, or has failed itself: so would the next one."""
    errors = ray_module().exceptions
    if isinstance(error, errors.RayTaskError) or getattr(error, "actor_init_failed", False):
        last = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        return Exit(1, reason=f"its Ray actor cannot run: {last} (does every node have this version of rallypoint?)")
    return Exit(128 + signal.SIGKILL, "SIGKILL", _reason(process, error))


def _reason(process: RayProcess, error: Exception) -> str:
    """Return why an actor is gone, as a phrase."""
    ray = ray_module()
    if process.drained:
        return GONE
    if any(process.begun and node["NodeID"] == process.begun.node and not node["Alive"] for node in ray.nodes()):
        return GONE
    text = str(error)
    if "low on memory" in text:
        return "Ray ended it for lack of memory on its node"
    return GONE if "node has died" in text else LOST
