"""The supervisor of one rank: ``python -m rallypoint.launch.engines.supervision DUTIES``; see `discovery.enter`.

Its children are the worker, and beside some ranks servers; rank 0 has the coordinator too. What dies by a signal is
started again here: servers and workers under new names, the coordinator at its old address. A child that ends with an
error ends the supervisor with its status. When the supervisor dies, its children do (`lifeline`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import msgspec

from rallypoint.errors import LinkError, RallypointError, StartAgain
from rallypoint.launch import environment
from rallypoint.launch.access import access_of
from rallypoint.launch.commands.by_hand import shown
from rallypoint.launch.console import RunConsole, Screen
from rallypoint.launch.engines.cluster import Command, Exit
from rallypoint.launch.engines.discovery import FoundJob, Place, RankDuties, board_of, listens, private_folder
from rallypoint.launch.engines.local import LocalCluster, LocalProcess
from rallypoint.launch.folder import Where, new_folder, token_file
from rallypoint.launch.lifeline import noted
from rallypoint.launch.plan import SNAPSHOTS_FOLDER, is_loopback
from rallypoint.net.handshake import new_token, role_token
from rallypoint.net.places import advertised
from rallypoint.net.tcp import EVERYWHERE
from rallypoint.observe.lenient import Unhurried, say

_SOMEWHERE = "192.0.2.1:9"  # an address of no machine (RFC 5737): the way to it is the way out of this one


def coordinator_arguments(
    place: Place, servers: int, given: str, fresh_folder: Callable[[], str], threads: int = 0
) -> tuple[str, ...]:
    """Return the arguments of ``rallypoint coordinator``: our defaults, then the user's own options, which win.

    `given`: RALLYPOINT_OPTIONS. `threads`: what OMP_NUM_THREADS asks for; 0: it does not. `fresh_folder` makes the
    run's folder, unless the user names one. There are snapshots if a folder is named, or if all is on one machine:
    others may not see the folder. It goes on from the newest.
    """
    own = _words(given)
    named = _value(own, "--folder")
    folder = named or fresh_folder()
    snapshots = _value(own, "--snapshots")
    if not snapshots:
        snapshots = str(Path(folder) / SNAPSHOTS_FOLDER) if named or place.one_machine else "none"
    bind, host = ("127.0.0.1:0", "") if place.one_machine else (f"{EVERYWHERE}:0", own_address(place))
    return (
        "--workers", str(place.world), "--servers", str(servers), "--folder", folder,
        *(["--threads", str(threads)] if threads else []),
        "--snapshots", snapshots, *(["--resume", "latest"] if snapshots != "none" else []),
        "--bind", bind, *(["--advertise", host] if host and not _value(own, "--bind") else []), *own,
    )  # fmt: skip


def again(arguments: tuple[str, ...], address: str) -> tuple[str, ...]:
    """Return the arguments of a coordinator that takes over from one that members reached at `address`.

    It listens at the same port, and goes on with the journal instead of a snapshot.
    """
    words, port = list(arguments), address.rpartition(":")[2]
    while "--resume" in words:
        at = words.index("--resume")
        del words[at : at + 2]
    last = max(n for n, word in enumerate(words) if word == "--bind")
    words[last + 1] = f"{words[last + 1].rpartition(':')[0]}:{port}"
    return tuple(words)


def own_address(place: Place) -> str:
    """Return this machine's address that the others can connect to: that of its way to torchrun's store, or out."""
    try:
        host = advertised(f"{EVERYWHERE}:0", towards=place.master or _SOMEWHERE).rpartition(":")[0]
    except LinkError:
        return ""
    if is_loopback(host) and place.master:  # the store is here: the others know its name
        return place.master.rpartition(":")[0]
    return host


def _words(given: str) -> list[str]:
    """Split as a shell does, and ``--folder=x`` into two words."""
    found: list[str] = []
    for word in shlex.split(given):
        found += word.split("=", 1) if word.startswith("--") else [word]
    return found


def _value(words: list[str], option: str) -> str:
    """Return the value of an option; "" without it."""
    return next((after for word, after in itertools.pairwise(words) if word == option), "")


_PAUSES_S = (0.0, 0.2, 1.0, 3.0)  # seconds before the next start, after the first, second, ... quick death
_POLL_S = 0.05
_LEAVE_S = 10.0  # seconds after SIGTERM in which a worker may hand over
_AFTER_ERROR_S = 10.0  # seconds in which the coordinator may tell the others why a worker has failed
_ASK_S = 0.5
_LAST_WORDS_S = 2.0  # seconds for the last lines of a rank that is told to end: its launcher waits for it
_SIGNALLED = 128  # higher statuses are of processes that a signal has ended
_EMPTY_S = 20.0  # seconds without any worker, after ours has ended well, until the job counts as left
_CLI = (sys.executable, "-P", "-m", "rallypoint.cli")


@dataclass(slots=True)
class _Child:
    process: LocalProcess
    started: float


@dataclass(slots=True)
class Upkeep:
    """Counts quick deaths in a row, by role. A process that dies within `quick_s` seconds has died quickly."""

    quick_s: float = 10.0
    quick_deaths: int = 12
    _quick: Counter[str] = field(default_factory=Counter)

    def died(self, role: str, ran_s: float) -> float | None:
        """Return in how many seconds another is started; None: never, too many have died soon after their start."""
        self._quick[role] = self._quick[role] + 1 if ran_s <= self.quick_s else 1
        if self._quick[role] > self.quick_deaths:
            return None
        return _PAUSES_S[min(self._quick[role] - 1, len(_PAUSES_S) - 1)]


class RankSupervisor:
    """The processes of one rank; `watch` runs them to the end."""

    def __init__(self, duties: RankDuties, cluster: LocalCluster, output: Unhurried) -> None:
        """What it says, and what its children print, goes to `output`."""
        self._duties, self._cluster, self._output = duties, cluster, output
        self._children: dict[str, _Child] = {}
        self._upkeep = Upkeep()
        self._start_at: list[tuple[float, Command]] = []
        self._names: dict[str, int] = {}
        self._address = duties.found.coordinator if duties.found else ""
        self._token = access_of(duties.found.token_file if duties.found else "").token  # the job's
        self._coordinator: tuple[str, ...] = ()  # its arguments
        self._console: RunConsole | None = None
        self._status: int | None = None  # the worker's
        self._coordinators_status: int | None = None
        self._ended_at = self._ask_at = 0.0
        self._again: set[str] = set()  # processes that were started in the place of others
        self._asked: set[str] = set()  # processes that want another one in their place
        self._late = False  # the worker that has ended was one of them: it may have come after the job's end
        self._empty_since: float | None = None

    def watch(self) -> int:
        """Run to the end. Returns the exit status."""
        with contextlib.ExitStack() as stack:
            interrupts = stack.enter_context(noted())
            named = self._coordinate(stack, interrupts) if self._duties.found is None else ""
            if self._address:
                for name in self._duties.servers:
                    self._start(self._server(name))
                self._start(self._command(f"worker{self._duties.place.rank}", "worker", self._duties.worker))
                if self._duties.found is None:
                    self._publish(stack, named)
            status = None
            while status is None and not interrupts:
                self._look()
                status = self._over()
                time.sleep(_POLL_S)
            return self._leave(interrupts[0]) if status is None else status

    # ---- starting ----

    def _coordinate(self, stack: contextlib.ExitStack, interrupts: list[int]) -> str:
        """Start the coordinator. If it ends first, there is no address. Returns the token's file, if one was made."""
        place, given = self._duties.place, os.environ.get(environment.OPTIONS, "")
        folder, named = stack.enter_context(private_folder(place)), ""
        if not self._token:
            self._token = new_token()
            named = str(stack.enter_context(token_file(folder, self._token)))
        self._coordinator = coordinator_arguments(
            place, self._duties.servers_in_all, given, lambda: str(new_folder(Path("runs")).resolve()),
            environment.threads_of(os.environ),
        )  # fmt: skip
        self._start(self._command("coordinator", "coordinator", (*_CLI, "coordinator", *self._coordinator)))
        while not (self._address or interrupts) and (self._children or self._start_at):
            self._look()
            time.sleep(_POLL_S)
        return named

    def _publish(self, stack: contextlib.ExitStack, token_file: str) -> None:
        """Say where the coordinator is, and show what it tells. (Importing torch to say it takes its time.)"""
        found = msgspec.json.encode(FoundJob(self._address, token_file))
        stack.enter_context(board_of(self._duties.place).published(found))
        # Other ranks print between our lines
        screen = Screen(file=cast(IO[str], self._output), force_terminal=False)
        where, transport = Where(self._address, self._token), access_of(role="observer").transport
        self._console, *_ = stack.enter_context(shown(where, transport, screen))

    def _server(self, name: str) -> Command:
        host = self._address.rpartition(":")[0]
        where: tuple[str, ...] = ("--bind", "127.0.0.1:0") if is_loopback(host) else ("--bind", f"{EVERYWHERE}:0")
        if self._duties.found is None and not is_loopback(host):
            where = (*where, "--advertise", host)  # the coordinator's machine is ours
        return self._command(name, "server", (*_CLI, "server", *where))

    def _command(self, name: str, role: str, argv: tuple[str, ...]) -> Command:
        threads = environment.with_threads(environment.threads_of(os.environ) or 1)
        env = {**threads, "PYTHONUNBUFFERED": "1", environment.ID: name}
        env |= {environment.COORDINATOR: self._address} if self._address else {}
        env |= {environment.TOKEN: role_token(self._token, role), environment.TOKEN_FILE: ""}
        return Command(name=name, role=role, argv=argv, env=env)

    def _start(self, command: Command) -> None:
        process = self._cluster.start(command, self._printer(command))
        self._children[command.name] = _Child(process, time.monotonic())

    def _printer(self, command: Command) -> Callable[[str], None]:
        def show(line: str) -> None:
            if command.role == "coordinator" and line.startswith(environment.LISTENS_AT):
                self._address = line.removeprefix(environment.LISTENS_AT)
            elif line.endswith(StartAgain.LINE):  # a progress bar may stand before it
                self._asked.add(command.name)
            else:
                self._say(line if command.role == "worker" else f"{command.name} | {line}")

        return show

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody reads it
            self._output.write(f"{line}\n")

    # ---- the loop ----

    def _look(self) -> None:
        """Note which children have ended, and start those that are due."""
        for name, child in list(self._children.items()):
            if (how := child.process.exit()) is not None:
                del self._children[name]
                self._ended(child, how)
        now = time.monotonic()
        due = [command for at, command in self._start_at if at <= now]
        self._start_at = [(at, command) for at, command in self._start_at if at > now]
        for command in due:
            try:
                self._start(command)
            except RallypointError as error:  # for want of processes or files, which may be free again soon
                self._start_again(command, str(error), 0.0)

    def _ended(self, child: _Child, how: Exit) -> None:
        command, now = child.process.command, time.monotonic()
        how = how.having_asked(command.name in self._asked)
        if not how.died:
            if command.role == "worker":
                self._status, self._ended_at = how.status, now
                self._late = command.name in self._again
            elif command.role == "coordinator":
                self._coordinators_status = how.status
            return
        self._start_again(command, f"{command.name} {how}", now - child.started, how.status)

    def _start_again(self, command: Command, why: str, ran_s: float, status: int = 1) -> None:
        now, pause = time.monotonic(), self._upkeep.died(command.role, ran_s)
        if pause is None:
            self._say(f"{why}; it is not started again: too many died soon")
            self._status, self._ended_at = status, now
            return
        self._say(f"{why}: starting another")
        self._start_at.append((now + pause, self._next(command)))

    def _next(self, command: Command) -> Command:
        """Return the command that takes this one's place."""
        if command.role == "coordinator":
            arguments = again(self._coordinator, self._address) if self._address else self._coordinator
            return self._command(command.name, command.role, (*_CLI, "coordinator", *arguments))
        first = command.name.partition("+")[0]
        self._names[first] = self._names.get(first, 0) + 1
        name = f"{first}+{self._names[first]}"  # a name is never used twice
        self._again.add(name)
        return self._command(name, command.role, command.argv)

    def _over(self) -> int | None:
        """Return the exit status if there is nothing left to do. A worker that has ended well leaves servers and the
        coordinator to others until they end by themselves. After an error they get a moment, in which the coordinator
        tells the others. A worker that was started again and found no job any more has not failed."""
        alone = not (self._children or self._start_at)
        if self._status is None:
            workers = [name for name, child in self._children.items() if child.process.command.role == "worker"]
            if workers and self._coordinators_status == 0 and self._never_joined(workers[0]):
                return 0
            return None if workers or self._start_at else 1
        if self._status and self._late and self._job_is_over():
            self._status = 0
        if self._status and (not alone or self._late):
            return self._status if time.monotonic() - self._ended_at > _AFTER_ERROR_S else None
        return self._status if alone else self._deserted()

    def _never_joined(self, worker: str) -> bool:
        """True if a worker that was started again is not in the job's last view: there is nothing left for it."""
        members = self._console.state.view if self._console else None
        return worker in self._again and members is not None and worker not in (*members.workers, *members.standby)

    def _job_is_over(self) -> bool:
        """True if the coordinator has ended well, or, where others have it, has ended."""
        if self._duties.found is None:
            return self._coordinators_status == 0
        if time.monotonic() < self._ask_at:
            return False
        self._ask_at = time.monotonic() + _ASK_S
        return not listens(self._address)

    def _deserted(self) -> int | None:
        """Return 1 if every worker has ended, and the job is not over: the coordinator would wait for ever."""
        console = self._console
        empty = console is not None and console.state.view is not None and not console.state.view.workers
        if console is None or not empty or console.finished or console.failure:
            self._empty_since = None
            return None
        self._empty_since = self._empty_since or time.monotonic()
        if time.monotonic() - self._empty_since < _EMPTY_S:
            return None
        self._say("every worker ended before the job was over: does the script loop to the last step?")
        return 1

    def _leave(self, number: int) -> int:
        """The launcher ends this rank: let the worker hand over, then end everything."""
        deadline = time.monotonic() + _LEAVE_S
        self._start_at = []
        members = [child.process for child in self._children.values() if child.process.command.role != "coordinator"]
        for process in members:
            process.signal(signal.SIGTERM)
        while any(process.exit() is None for process in members) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return 128 + number


def main(arguments: list[str]) -> int:
    duties, output, status = msgspec.json.decode(arguments[0], type=RankDuties), Unhurried(sys.stdout), 1
    try:
        with LocalCluster() as cluster:
            status = RankSupervisor(duties, cluster, output).watch()
    except RallypointError as error:
        say(f"error: {error}", error=True)
    output.end(_LAST_WORDS_S if status > _SIGNALLED else None)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
