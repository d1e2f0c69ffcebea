"""The roles of a job as commands: how they start, and the lines that they print when no launcher has started them."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import msgspec

from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Aborted, Finished, Message, Release, SnapshotWanted
from rallypoint.core.typed import counted
from rallypoint.errors import ConfigError, LinkError, UsageError, how_it_ended, meant
from rallypoint.launch import environment
from rallypoint.launch.access import Access, access_of
from rallypoint.launch.commands.resume import command_of, start_of
from rallypoint.launch.console import RunConsole, Screen
from rallypoint.launch.engines.ranks import grouped
from rallypoint.launch.folder import Where, coordinated, token_file
from rallypoint.launch.lifeline import LIFELINE_THREAD, handled, hold_lifeline
from rallypoint.launch.observing.health import Health, of_process, stuck_for
from rallypoint.launch.observing.stacks import keep_stacks
from rallypoint.launch.options import check_script
from rallypoint.launch.plan import Launch, is_loopback, join_info_of, terms_of
from rallypoint.launch.run import INTERRUPTED, LAST_SNAPSHOT_S
from rallypoint.net.handshake import Identity, new_token, role_token
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.places import Whereabouts, advertised
from rallypoint.net.transport import Transport
from rallypoint.observe.lenient import flush_output, say
from rallypoint.observe.lines import printable_lines
from rallypoint.watch.metrics import Figure, JobFigures, of_aggregator, of_server, of_view

if TYPE_CHECKING:
    from rallypoint.aggregator import AggregatorService
    from rallypoint.server.service import ServerService

FAILED = 3  # the exit status of a coordinator and of servers whose job has failed
_LAST_WORD_S = 2.0  # seconds in which the end of the job may arrive at the console
_POLL_S = 0.02
_MOMENT_S = 1.0  # seconds in which threads that are about to end may do so
_LONGEST_LIFE_S = 86_400.0  # for which members go on without a coordinator
_MANY, _ASK_FOR_LOCK_S = 100, 0.1  # members; see `share_lock_among_many`
_T = TypeVar("_T", bound=msgspec.Struct)


def decoded(text: str, kind: type[_T], option: str) -> _T:
    """Return the struct that an option's JSON describes. Raises ConfigError for an unknown key or a wrong value."""
    try:
        data = msgspec.json.decode(text, type=dict[str, Any])
        unknown = [key for key in data if key not in kind.__struct_fields__]
        if unknown:
            raise ConfigError(f"{option}: there is no {unknown[0]}{meant(unknown[0], kind.__struct_fields__)}")
        return msgspec.convert(data, kind)
    except msgspec.DecodeError as error:  # (a ValidationError is one)
        raise ConfigError(f"{option} cannot be read: {error}") from None


def described(plan: Launch) -> tuple[Terms, JoinInfo]:
    """Return what the coordinator of such a cluster needs to know. With no folder it keeps no journal."""
    about = join_info_of(plan)
    local = bool(plan.snapshots) and "://" not in plan.snapshots
    about = msgspec.structs.replace(
        about, folder=about.folder if plan.folder else "",
        snapshots=str(Path(plan.snapshots).resolve()) if local else plan.snapshots,
    )  # fmt: skip
    terms = terms_of(plan)
    if given := os.environ.get(environment.LIVING, ""):
        terms = msgspec.structs.replace(terms, living=_seconds(given))
    return terms, about


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1.0 <= seconds <= _LONGEST_LIFE_S:
        raise UsageError(f"{environment.LIVING}={text}: give the seconds for which members go on without a coordinator")
    return seconds


def share_lock_among_many(terms: Terms) -> None:
    """In a coordinator of many members, let threads wait longer before they ask for Python's lock.

    Each that is ready to run asks every 5 ms by default. With a thousand of them the asking takes the processor: with
    1,000 members the first view had not come after 90 s, and with 0.1 s it came after 6 (`benchmarks/members.py`).
    """
    if terms.workers_start + terms.servers >= _MANY:
        sys.setswitchinterval(_ASK_FOR_LOCK_S)


def run_coordinator(
    terms: Terms, about: JoinInfo, access: Access, health: Health, *, bind: str, advertise: str, resume: str,
    linger: float = 0.0,
) -> int:  # fmt: skip
    """Run the coordinator of one job to its end. Returns the exit status.

    At a good end it waits up to `linger` seconds for the workers' scripts. Without a launcher it shows the job's
    progress, and the token if it had to make one; Ctrl-C ends the job then, and SIGTERM this coordinator (see
    `_told_to_go`). UsageError if another coordinator runs in the folder.
    """
    by_hand, interrupted = not hold_lifeline(), False
    keep_stacks("coordinator")
    # On loopback too: other users of this machine can connect. With TLS a certificate is enough
    token = access.token or ("" if access.transport.secure else new_token())
    with contextlib.ExitStack() as stack:
        if by_hand:
            stack.enter_context(_told_to_go(about.folder))
        if about.folder:
            stack.enter_context(coordinated(Path(about.folder)))
        terms = msgspec.structs.replace(terms, begun_by=command_of(resume, about) if by_hand else "", by_hand=by_hand)
        start, changes = start_of(resume, about, terms.begun_by)
        figures = JobFigures(terms, time.time())
        service = CoordinatorService(
            terms=terms, bind=bind, advertise=advertise, join_info=about, resume=start, token=token,
            transport=access.transport,
            announced=figures.now if health.address else None,
        )  # fmt: skip
        health.metrics.read = of_process("coordinator", "coordinator", health.ready, access.transport, figures.read)
        share_lock_among_many(terms)
        service.start()
        health.joined(stuck=lambda: stuck_for("the coordinator", service.busy_s))
        for change in changes:
            service.say(f"going on from {resume} with another setting: {change}")
        stack.callback(service.close)  # also after Ctrl-C: its threads would keep the process
        say(f"{environment.LISTENS_AT}{service.address}")
        where = Where(service.address, token)
        if not access.token and token:
            file = stack.enter_context(token_file(Path(about.folder or "."), token))
            say(
                f"members need its token, which only you can read:  export RALLYPOINT_COORDINATOR={service.address} "
                f'RALLYPOINT_TOKEN="$(cat {shlex.quote(str(file))})"'
            )
        if how := service.ended_before:
            say(
                f"nothing is trained: the job in {about.folder} has {printable_lines(how)}. Members that come are told "
                "so. For a new job name another --folder, or empty this one"
            )
        elif by_hand:
            servers, workers = counted(terms.servers, "server"), counted(terms.workers_start, "worker")
            say(f"waiting for {servers} and {workers}")
        if by_hand:
            console, link, told = stack.enter_context(shown(where, access.transport))
            console.later = service.is_later
        while True:
            try:
                failure = service.wait()
                break
            except KeyboardInterrupt:
                if not by_hand or interrupted:
                    raise
                if console.holding:  # the first Ctrl-C lets the job end without its last version stored
                    console.holding = False
                    link.send(Release())
                    continue
                interrupted = True
                if terms.snapshots:
                    _take_last_snapshot(console, link)
                service.abort("the coordinator was interrupted")
        if by_hand:
            told.wait(_LAST_WORD_S)
        elif failure is not None:  # the launcher's link may not be up yet, if the members were faster
            say(environment.failure_line(failure))
        if failure is None:
            service.wait_for_scripts(linger)
    if by_hand and failure is not None:
        say(f"failed: {printable_lines(str(failure))}")
    if interrupted:
        return INTERRUPTED
    return 0 if failure is None else FAILED


def _take_last_snapshot(console: RunConsole, link: CoordinatorLink) -> None:
    """After Ctrl-C: store the newest version if that is quick. Ctrl-C again ends the wait."""
    steps, until = console.state.step, time.monotonic() + LAST_SNAPSHOT_S
    link.send(SnapshotWanted())
    with contextlib.suppress(KeyboardInterrupt):
        while console.steps_stored < steps and not console.state.ended and time.monotonic() < until:
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _told_to_go(folder: str) -> Iterator[None]:
    """In the body, SIGTERM ends this coordinator. With a journal in `folder` it ends at once and alone, as a machine
    that fails: another one goes on with the job. Without one nobody could, so the job ends, as after Ctrl-C. It is
    heeded in containers too: as process 1 a program without a handler would not notice it."""

    def go(number: int, frame: object) -> None:
        if not folder:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(1, f"told to go: another coordinator with --folder {folder} goes on with the job\n".encode())
        os._exit(128 + number)

    heeded = signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    with handled([signal.SIGTERM] if heeded else [], go):
        yield


def check_reachable(role: str, bind: str, advertise: str, coordinator: str) -> None:
    """Raise UsageError for a server or aggregator on loopback whose coordinator is not: members elsewhere could not
    connect to it. Where nobody knows yet where the coordinator is (a file that is not there), nothing is checked."""
    if advertise or not is_loopback(bind.rpartition(":")[0]):
        return
    with contextlib.suppress(LinkError):
        for place in Whereabouts(coordinator).now():
            mine = advertised("[::]:0", towards=place)
            if not is_loopback(mine.rpartition(":")[0]):
                raise UsageError(
                    f"no other machine can connect to a {role} at {bind}, and the coordinator is at {place}, which "
                    f"others reach too: add --bind {mine}, this machine's address on the way there"
                )


def run_server(
    service: ServerService | AggregatorService, coordinator: str, health: Health, transport: Transport
) -> int:  # fmt: skip
    """Run one server or aggregator, whose links use `transport`, to the end of its job. Returns the exit status. On
    SIGTERM it leaves the job."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else torch (2.13) takes memory of a GPU to step an optimizer on the CPU
    from rallypoint.optim import import_for_optimizers  # torch, which a coordinator needs not

    by_hand, left = not hold_lifeline(), threading.Event()
    keep_stacks(service.role)

    def leave(number: int, frame: object) -> None:
        left.set()
        service.leave()

    signal.signal(signal.SIGTERM, leave)
    health.metrics.read = of_process(service.role, service.id, health.ready, transport, lambda: _readings(service))
    service.start()
    health.joined(service.unready, lambda: stuck_for(service.id, service.busy_s))
    try:
        if by_hand:
            where = f"listens at {service.address} and has joined the job at {coordinator}"
            say(f"{service.id} {where}; it waits for {service.waits_for}")
        import_for_optimizers()
        failure = service.wait()
    finally:
        service.close()
    if by_hand:
        over = "is over" if service.view is not None else f"was over before this {service.role} took part in it"
        ended = f"the job {over}" if failure is None else how_it_ended(printable_lines(str(failure)))
        say(f"{service.id}: {ended}")
    if failure is None and left.is_set():
        return environment.left_status()
    return 0 if failure is None else FAILED


def _readings(service: ServerService | AggregatorService) -> Iterator[Figure]:
    yield from of_view(service.view)
    if service.role == "server":
        yield from of_server(cast("ServerService", service).machine, cast("ServerService", service).waiting)
    else:
        yield from of_aggregator(cast("AggregatorService", service).counts)


def end_process(status: int) -> NoReturn:
    """End this process with `status`, once its role is closed.

    Roles wait for all of their threads, but for one that a store does not answer only END_PATIENCE_S of
    `store.files`. Such a thread must not meet the interpreter's end: if it takes the GIL then, inside of C++ code, the
    process aborts (before CPython 3.14), whatever its status was to be. So the process ends here if a thread is left
    after a moment: that of a link which is closed may still be ending.
    """
    deadline = time.monotonic() + _MOMENT_S
    known = {threading.main_thread().name, LIFELINE_THREAD}
    others = [thread for thread in threading.enumerate() if thread.name not in known]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        flush_output()
        os._exit(status)  # without the exit functions: they may wait for what the thread holds
    sys.exit(status)


def start_worker(
    command: Sequence[str], *, coordinator: str, token_file: str, id: str, health: str = "", tls: str = "",
    ranks: int = 1,
) -> None:  # fmt: skip
    """Replace this process by a program that joins the job at `coordinator` with `rallypoint.join`.

    `command` is a script, for this Python, or a program, and its arguments. With several `ranks` this process becomes
    the one that starts and watches so many.
    """
    argv = grouped(tuple(_argv_of(command)), ranks)
    name = id or environment.own_name("worker")
    address, access = address_of(coordinator), access_of(token_file, "worker", tls)
    if not (access.token or access.transport.secure):
        raise UsageError(
            "a worker needs the job's token: give --token-file FILE, or set RALLYPOINT_TOKEN as the coordinator has "
            "said; with TLS, --tls FOLDER is enough"
        )
    say(f"{name} runs {command[0]} for the job at {address}")
    env = {
        **os.environ, environment.COORDINATOR: address, environment.ID: name, environment.TOKEN: access.token,
        **environment.with_threads(environment.threads_of(os.environ) or 1),
    }  # fmt: skip
    env.pop(environment.TOKEN_FILE, None)  # it may hold the job's token, which is no worker's business
    if tls:
        env[environment.TLS] = str(Path(tls).resolve())
    if health:
        env[environment.HEALTH] = health
    os.execve(argv[0], argv, env)


def _argv_of(command: Sequence[str]) -> list[str]:
    """A program with its path, and its arguments. UsageError if there is no such script or program. What ends in .py,
    and a file that is not executable, is a script: ``train.py``. The rest are programs: ``python train.py``,
    ``./train.sh``."""
    first = Path(command[0])
    if first.suffix != ".py" and (program := shutil.which(command[0])):
        return [program, *command[1:]]
    if first.suffix != ".py" and not first.exists():
        raise UsageError(f"there is no script {first}, and no program of that name")
    check_script(first)
    return [sys.executable, *command]


def address_of(given: str) -> str:
    """Return where the coordinator may be, from an option or the environment. UsageError without it."""
    if address := given or os.environ.get(environment.COORDINATOR, ""):
        return str(Whereabouts(address))
    raise UsageError("which job? give --coordinator host:port or set RALLYPOINT_COORDINATOR")


@contextlib.contextmanager
def shown(
    where: Where, transport: Transport, screen: Screen | None = None
) -> Iterator[tuple[RunConsole, CoordinatorLink, threading.Event]]:  # fmt: skip
    """While in the body, show the job's progress. Yields the console, the link that it hears, and the event that the
    job's end has been shown."""
    console, told = RunConsole(screen), threading.Event()

    def show(message: Message) -> None:
        console.show(message)
        if isinstance(message, Finished | Aborted):
            told.set()

    me = Identity("observer", "console", role_token(where.token, "observer"))
    closed = Handlers(show, lambda error: None)  # the coordinator closes an observer's link when the job is over
    link = CoordinatorLink(transport=transport, address=where.coordinator, me=me, handlers=closed)
    link.start()
    try:
        yield console, link, told
    finally:
        link.close()
        console.close()
