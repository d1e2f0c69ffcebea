"""``rallypoint run``: prepares a run's folder, runs its cluster to the end, reports how it ended.

`ClusterRun` applies the `Supervisor`'s decisions to a `Cluster`, shows progress, ends every process.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.markup import escape

from rallypoint.core.protocol import Drain, Finished, Release, Resize, SnapshotWanted
from rallypoint.core.typed import named
from rallypoint.errors import AccessDenied, LinkError, RallypointError, UsageError
from rallypoint.launch import environment, kept_code
from rallypoint.launch.access import transport_of
from rallypoint.launch.console import Output, OutputClosed, RunConsole, Screen
from rallypoint.launch.engines.cluster import Cluster, Command, Exit, Handle, cluster_of, kind_of
from rallypoint.launch.engines.local import LineRelay
from rallypoint.launch.engines.ranks import grouped
from rallypoint.launch.folder import (
    CLUSTER_FILE,
    Where,
    clear,
    locked,
    not_begun,
    refuse_an_old_run,
    refuse_unwritable_snapshots,
    refuse_used_snapshots,
    write_where,
)
from rallypoint.launch.lifeline import NOTICES, Interrupted, noted, raised
from rallypoint.launch.observing.beside import Observers, merge_trace
from rallypoint.launch.plan import (
    Launch,
    certificates_of,
    coordinator_arguments,
    environment_of,
    resized,
    server_arguments,
    write_plan,
)
from rallypoint.launch.supervisor import (
    COORDINATOR,
    Decision,
    DrainProcess,
    Fail,
    RestartLimits,
    RunOver,
    StartProcess,
    Supervisor,
    Warn,
)
from rallypoint.net.handshake import LAUNCHER, Identity, new_token, role_token
from rallypoint.net.member import CoordinatorLink, Handlers

INTERRUPTED = 130  # the exit status after Ctrl-C
CLOSED = 141  # the status of a process that SIGPIPE ended, when nobody reads our output any more


def launch(
    plan: Launch, console: RunConsole, intervene: Intervene = lambda run: None, *, overwrite: bool = False,
    original: bool = False, made: bool = False,
) -> int:  # fmt: skip
    """Start the cluster, show its progress, restart what dies, end it. Returns the exit status.

    `intervene` is called repeatedly until all workers have ended, and may change the cluster. `overwrite` deletes what
    an earlier run has left in the folder; without it that raises UsageError (except with `plan.resume`). With
    `original` a resumed run uses the code that it began with, not the files as they are now. `made`: its folder was
    made for it (`new_folder`), and goes if it cannot begin.
    """
    folder = Path(plan.folder)
    fresh = made or not folder.exists()
    with locked(folder), not_begun(folder) if fresh else contextlib.nullcontext():
        if overwrite:
            if stays := clear(folder):
                console.say(f"[yellow]{escape(stays)}[/yellow]")
            refuse_used_snapshots(plan.snapshots)
        elif not plan.resume:
            refuse_an_old_run(folder, plan.snapshots)
        if plan.engine == "local":  # else the servers' machines write them
            refuse_unwritable_snapshots(plan.snapshots)
        write_plan(plan)  # first: without it `not_begun` takes the code for a user's own
        edited = _keep_code(plan, console, original=original)
        console.console.print(f"[dim]the run's folder: {escape(plan.folder)}[/dim]", soft_wrap=True)
        screen = console.console
        screen.print(f"[dim]starting {_started(plan)}: each imports torch first[/dim]", soft_wrap=True)
        if not isinstance(screen, Screen):
            return _launch_locked(plan, console, intervene, edited)
        with screen.unhurried():
            status = _launch_locked(plan, console, intervene, edited)
            screen.hurried = status in (INTERRUPTED, CLOSED)
        return status


def _launch_locked(plan: Launch, console: RunConsole, intervene: Intervene, edited: list[str]) -> int:
    def warn(text: str) -> None:
        console.say(f"[yellow]{escape(text)}[/yellow]")

    engine = kind_of(plan.engine)
    try:
        with (raised(), cluster_of(plan, warn) as cluster, ClusterRun(plan, console, cluster, edited) as run):
            status = run.watch(intervene)
        if status == 0:
            folder = f"{plan.folder} (its curves: rallypoint watch {shlex.quote(plan.folder)})"
            console.console.print(f"[dim]everything of this run: {escape(folder)}[/dim]", soft_wrap=True)
        return status
    except (KeyboardInterrupt, Interrupted) as interrupt:
        console.close()
        number = interrupt.args[0] if isinstance(interrupt, Interrupted) else signal.SIGINT
        by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        console.say(f"[yellow]interrupted{by}: every process has been ended[/yellow]")
        console.say_how_to_go_on(plan, failed=False)
        if number in engine.notices:
            console.say(escape(engine.run_again()))
        return INTERRUPTED
    except OutputClosed:
        return CLOSED
    finally:
        (Path(plan.folder) / CLUSTER_FILE).unlink(missing_ok=True)


def _keep_code(plan: Launch, console: RunConsole, *, original: bool) -> list[str]:
    """Copy the script and its modules into the run's folder. For a resumed run, report which of them have changed.
    Returns the files that differ from the copies from now on: none, unless `original`."""
    folder = Path(plan.folder)
    if not plan.script:
        return []
    if plan.resume and (folder / kept_code.CODE).is_dir():
        changed = kept_code.changed(plan.script, folder)
        which = "as it was (--original)" if original else "as it is now; --original takes it as it was"
        if changed:
            files = escape(named(changed))
            console.say(f"[yellow]changed since the run began: {files}. The code runs {which}[/yellow]")
        if original:
            return changed
    if sentence := kept_code.keep(plan.script, folder):
        console.say(f"[yellow]{escape(sentence)}[/yellow]")
    return []


def _started(plan: Launch) -> str:
    """What a run starts at once beside its coordinator, as ``2 servers and 4 workers``."""
    numbers = {"server": plan.servers, "aggregator": plan.aggregators, "worker": plan.workers[1] + plan.standby}
    said = [f"{number} {role}{'s' * (number != 1)}" for role, number in numbers.items() if number]
    return f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else "".join(said)


LIMITS = RestartLimits()
_GRACE_S = 5.0  # seconds in which the worker that has failed the job may end by itself
_CLOSE_S = 15.0  # seconds in which servers and the coordinator may close their files; longer than a store is waited for
_ERROR_S = 1.0  # seconds in which other workers may end with the error that one has ended with
_POLL_S, _PORTION_S = 0.02, 0.1  # between two looks; for lines without end, before there is a look around
LAST_SNAPSHOT_S, _NOTICE_S = 3.0, 60.0  # for a last snapshot: after Ctrl-C, after a notice (it comes early)
_LOST_S = 15.0  # in which a worker may end that was given up before the end; longer than it takes to leave
_SILENCE_S = 5.0  # seconds after which a wait reports what it waits for

Intervene = Callable[["ClusterRun"], None]


class ClusterRun:
    """One run on a cluster; a context manager that ends all of its processes."""

    def __init__(self, plan: Launch, console: RunConsole, cluster: Cluster, edited: Sequence[str] = ()) -> None:
        """`edited`: the user's files that are known to differ from the copies that the run keeps."""
        self.plan, self.console, self.cluster = plan, console, cluster
        wanted = {"worker": plan.workers[1] + plan.standby, "server": plan.servers, "aggregator": plan.aggregators}
        self.supervisor = Supervisor(wanted, LIMITS if plan.restart else RestartLimits(restart=False))
        self.handles: dict[str, Handle] = {}
        self.failure = ""
        self._over, self._coordinators = False, 0  # how many coordinators were started
        self._token, self._address, self._tls = new_token(), "", certificates_of(plan)
        self._transport = transport_of(self._tls, "observer")
        self._lines = LineRelay()
        self._output, self._beside = Output(), Observers(plan)
        self._observer: CoordinatorLink | None = None
        self._endings, self._said_changed = list[str](), list(edited)

    def __enter__(self) -> ClusterRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._end()
        finally:  # a second signal has interrupted it: the cluster's end waits for who waits for room
            self._lines.open()
        self._beside.close()
        self.console.close()

    # ---- queries and commands for others ----

    def of_role(self, role: str) -> list[Handle]:
        """Return the running processes of a role, the oldest first."""
        return [handle for handle in self.handles.values() if handle.command.role == role and handle.exit() is None]

    def resize(self, workers: int) -> None:
        """Let this many workers compute from now on."""
        assert self._observer is not None
        self._observer.send(Resize(workers))
        self._resized(Resize(workers))

    def watch(self, intervene: Intervene) -> int:
        """Run until the job is over. Returns the exit status."""
        with noted() as interrupts:
            self._do(self.supervisor.begin(time.monotonic()))
            while not (self._is_over or self.console.failure or self.failure):
                if interrupts and not self._release(interrupts):
                    first = interrupts[0]
                    _take_last_snapshot(self, interrupts, _NOTICE_S if first in NOTICES else None)
                    raise Interrupted(first)
                if isinstance(self.console.console, Screen) and self.console.console.closed:
                    _take_last_snapshot(self, interrupts)
                    raise OutputClosed
                self._look()
                if self._observer is not None:
                    # The coordinator reports its own waits more often than that
                    self.console.warn_of_silence(2 * _SILENCE_S)
                    intervene(self)
                time.sleep(_POLL_S)
            if self.failure and self.of_role("worker") and self.of_role(COORDINATOR):
                _take_last_snapshot(self, interrupts)
        self._wait(intervene)
        return self._verdict()

    def _release(self, interrupts: list[int]) -> bool:
        """The first Ctrl-C while members hold the newest version lets the job end without storing it."""
        if not self.console.holding or self._observer is None:
            return False
        self.console.holding = False
        interrupts.clear()
        self.console.say("ending without the last version stored (again Ctrl-C ends every process)")
        self._observer.send(Release())
        return True

    @property
    def _is_over(self) -> bool:
        return self._over or self.console.finished

    def _look(self) -> None:
        """Look for events, pass them to the supervisor, apply its decisions."""
        self._relay()
        if self._observer is None and self._address:
            self._observe()
        _note_members(self)
        if self.console.holding:
            self.supervisor.held(self.console.heard)
        for line in self._beside.look(self.console):
            self.console.console.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)
        while not self.console.sizes.empty():
            self._resized(self.console.sizes.get())
        for name, how in self._ended():
            decisions = self.supervisor.ended(name, self._output.exit_of(name, how), time.monotonic())
            self.console.ended(name, said=bool(decisions))
            self._do(decisions)
        self._do(self.supervisor.due(time.monotonic()))

    def _ended(self) -> list[tuple[str, Exit]]:
        """Return the processes that have ended since the last call."""
        ended = [(name, how) for name, handle in self.handles.items() if (how := handle.exit()) is not None]
        self._relay(whole=bool(ended))
        for name, how in ended:
            self._beside.ended(name, how)
            worker = self.handles.pop(name).command.role == "worker"
            lines = self._output.ended(name, time.monotonic(), well=how.status == 0)
            self.console.relay_all(lines)
            if how.status != 0 and self._is_over and worker and name in self.supervisor.took_part:
                if _was_given_up(self, name) and not lines:
                    self.console.say(f"[yellow]{name}, which was given up before the job's end, {how}[/yellow]")
                else:
                    self._endings.append(f"{name} {how}")
        return ended

    def _do(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            match decision:
                case StartProcess(name=name, role=role):
                    self._start(name, role)
                case DrainProcess(name=name):
                    self.handles[name].signal(signal.SIGTERM)
                case Warn(text=text):
                    self.console.say(f"[yellow]{escape(text)}[/yellow]")
                case Fail(reason=reason):
                    self.failure = reason
                case RunOver():
                    self._over = True
                    self.console.show(Finished())  # the link may have been down when the coordinator sent this

    def _resized(self, size: Resize | Drain) -> None:
        if isinstance(size, Drain):
            return self._do([DrainProcess(size.member)] if size.member in self.handles else [])
        wanted = (("worker", size.workers and size.workers + self.plan.standby), ("server", size.servers))
        self._do(self.supervisor.resized({role: number for role, number in wanted if number}, time.monotonic()))
        self.plan = resized(self.plan, size.workers, size.servers)
        try:
            write_plan(self.plan)  # a later `rallypoint resume` starts with this size
        except UsageError as error:
            self.console.say(f"[yellow]{escape(str(error))}: the new size is for this run only[/yellow]")

    # ---- processes ----

    def _start(self, name: str, role: str) -> None:
        self.console.started.add(name)
        try:
            tells_us = (environment.LISTENS_AT, environment.JOB_FAILED) if name == COORDINATOR else ()
            self.handles[name] = self.cluster.start(
                self._command(name, role), lambda line: self._lines.put(name, line, first=line.startswith(tells_us))
            )
        except (RallypointError, OSError) as error:  # for want of file descriptors, say, which may be free again later
            if not (self.supervisor.took_part or (name == COORDINATOR and self._address)):
                raise
            self._do(self.supervisor.ended(name, Exit(1, reason=str(error), started=False), time.monotonic()))

    def _command(self, name: str, role: str) -> Command:
        match role:
            case "coordinator":
                self.console.holding = False  # it would say so again
                arguments = coordinator_arguments(self.plan, self._address, self._coordinators)
                self._coordinators += 1
                argv = (sys.executable, "-P", "-m", "rallypoint.cli", "coordinator", *arguments)
            case "server" | "aggregator":
                argv = (sys.executable, "-P", "-m", "rallypoint.cli", role, *server_arguments(self.plan))
            case _:
                argv = grouped(_worker_argv(self, name), self.plan.ranks)
        access = {environment.TOKEN: role_token(self._token, role), environment.TLS: self._tls}
        env = environment_of(name, self._address, self.plan) | access | self._beside.environment
        return Command(name=name, role=role, argv=argv, env=env)

    def _listening(self, address: str) -> None:
        """The coordinator is ready. The first time, start the others."""
        if not self._address:
            self._address = address
            write_where(Path(self.plan.folder), Where(address, self._token, self._tls))
            self._beside.start()
        self._do(self.supervisor.listening(time.monotonic()))

    def _observe(self) -> None:
        """Connect to the coordinator. If it has just died, the next one will listen soon."""
        with contextlib.suppress(LinkError, AccessDenied):  # (somebody else may listen there meanwhile)
            observer = CoordinatorLink(
                transport=self._transport, address=self._address,
                me=Identity("observer", LAUNCHER, role_token(self._token, "observer")),
                handlers=Handlers(self.console.show, self._on_lost), patience=0.0,
            )  # fmt: skip
            observer.start()
            self._observer = observer

    def _on_lost(self, error: RallypointError) -> None:
        if not (self.console.finished or self.console.failure):
            self.failure = f"the coordinator is gone: {error}"

    def _relay(self, *, whole: bool = False) -> None:
        """Show the lines that have come: all that wait by now (`whole`), or a portion, after which to look around."""
        until = time.monotonic() + _PORTION_S
        for _ in range(len(self._lines)):
            if not whole and time.monotonic() > until:
                break
            name, line = self._lines.take()
            if name == COORDINATOR and line.startswith(environment.LISTENS_AT):
                self._listening(line.removeprefix(environment.LISTENS_AT))
            elif name == COORDINATOR and line.startswith(environment.JOB_FAILED):
                self.console.failure = msgspec.json.decode(line.removeprefix(environment.JOB_FAILED))
            elif name not in self.handles or not self._beside.takes(self.handles[name].command, line):
                self.console.relay_all(self._output.line(name, line, time.monotonic()))
        if not (self._is_over or self.console.failure or self.failure):  # otherwise they are about to end
            self.console.relay_all(self._output.due(time.monotonic()))

    # ---- the end ----

    def _wait(self, intervene: Intervene) -> None:
        """Wait until workers have ended by themselves: to save the model, or with the error that ends the job."""
        _note_members(self)  # the last ones may have come together with the job's end
        for handle in self._worth_waiting_for(0.0) if self._is_over else ():
            if _was_given_up(self, handle.command.name):  # it would look for a coordinator for a minute
                handle.signal(signal.SIGCONT)
                handle.signal(signal.SIGTERM)
        began = said = time.monotonic()
        while left := self._worth_waiting_for(time.monotonic() - began):
            self._ended()
            intervene(self)  # it may have stopped one of them
            time.sleep(_POLL_S)
            if self._is_over and time.monotonic() - said > _SILENCE_S:
                said = time.monotonic()
                names = ", ".join(handle.command.name for handle in left)
                self.console.say(f"the job is over; waiting for {names}, whose script goes on")

    def _worth_waiting_for(self, waited: float) -> list[Handle]:
        workers = self.of_role("worker")
        took_part = [handle for handle in workers if handle.command.name in self.supervisor.took_part]
        if self._is_over:  # a worker that was only just started has nothing to do here
            patient = waited < _LOST_S
            return [handle for handle in took_part if patient or not _was_given_up(self, handle.command.name)]
        if self.console.failure:
            culprit = self.console.failure.partition(":")[0]
            if culprit in self.handles and waited < _GRACE_S:
                return workers
        return workers if waited < _ERROR_S else []

    def _end(self) -> None:
        """Let servers and the coordinator close their files for a moment, then kill every process."""
        self._output.ending = not (self._is_over or self.console.failure or self.failure)
        if self._is_over or self.console.failure:
            self._let_close()
            self._relay(whole=True)  # the coordinator's word may have overtaken lines
        self._ended()
        self._output.ending = True
        if self._observer is not None:
            self._observer.close()  # otherwise the coordinator would announce each of the following deaths
            self._observer = None
        _interrupt(self, self.of_role(COORDINATOR))  # first: that scripts end now is no failure of the job
        _interrupt(self, list(self.handles.values()))
        self._lines.open()
        self.cluster.end()
        self._ended()

    def _let_close(self) -> None:
        """Wait until servers and the coordinator have ended; not longer than _CLOSE_S."""
        _note_members(self)
        began = said = time.monotonic()
        while left := _with_files(self):
            now = time.monotonic()
            if now - began > _CLOSE_S:
                return
            if now - said > _SILENCE_S:
                said = now + _CLOSE_S  # once is enough
                names = ", ".join(handle.command.name for handle in left)
                whose = "their" if len(left) > 1 else "its"
                self.console.say(f"the job is over; waiting for {names} to close {whose} files")
            self._relay()
            time.sleep(_POLL_S)

    def _verdict(self) -> int:
        self._end()
        self.console.close()
        if self.plan.trace:
            merge_trace(self.plan, self.console)
        reason = self.console.failure or self.failure or "; ".join(self._endings)
        name = reason.partition(" ")[0]
        if not self.console.failure and (sentence := self._output.sentence_of(name)):
            reason = f"{name}: {sentence}"  # what the coordinator would have reported, had it been faster
        self.console.relay_all(self._output.rest(reason))
        for sentence in self._output.summary():
            self.console.say(f"[dim]{escape(sentence)}[/dim]")
        if self._is_over and not self._endings:
            return 0
        self.console.say(f"[bold red]failed[/bold red]: {escape(reason)}")
        if not self._is_over:
            self.console.say_how_to_go_on(self.plan, failed=True)
        for line in self._beside.failed():
            self.console.console.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)
        return 1


def _worker_argv(run: ClusterRun, name: str) -> tuple[str, ...]:
    if not run.plan.script:
        return run.plan.worker
    changed = kept_code.changed(run.plan.script, Path(run.plan.folder))
    if changed and changed != run._said_changed:
        run._said_changed = changed
        run.console.say(
            f"[yellow]edited since the run began: {escape(named(changed))}; {name} runs the code that the "
            "run began with[/yellow]"
        )
    return kept_code.worker_argv(run.plan.worker, run.plan.script, Path(run.plan.folder))


def _interrupt(run: ClusterRun, handles: Sequence[Handle]) -> None:
    """Send SIGINT to these processes, and wait a moment for their end. (A worker's ``finally`` may end others.)"""
    for handle in handles:
        handle.signal(signal.SIGCONT)
        handle.signal(signal.SIGINT)
    deadline = time.monotonic() + _ERROR_S
    while any(handle.exit() is None for handle in handles) and time.monotonic() < deadline:
        run._relay()
        time.sleep(_POLL_S)


def _note_members(run: ClusterRun) -> None:
    """Tell the supervisor who is in the newest view. The job can do without standbys."""
    if (members := run.console.state.view) is not None:
        run.supervisor.members((*members.workers, *members.servers, *members.aggregators))


def _was_given_up(run: ClusterRun, worker: str) -> bool:
    """True if a worker that took part is no member any more: it may be paused, and hears nothing of the end."""
    members = run.console.state.view
    return members is not None and worker not in (*members.workers, *members.standby)


def _with_files(run: ClusterRun) -> list[Handle]:
    """The processes that may have to close files: not those that never joined. They look for a job that is over."""
    joined = [h for role in ("server", "aggregator") for h in run.of_role(role)]
    return [*(h for h in joined if h.command.name in run.supervisor.took_part), *run.of_role(COORDINATOR)]


def _take_last_snapshot(run: ClusterRun, interrupts: list[int], patience: float | None = None) -> None:
    """After Ctrl-C, when nobody reads our output, or when a process has failed: take a snapshot if that is quick.
    Ctrl-C again ends the wait, and so does SIGTERM. A notice does not: batch systems repeat it (SIGXCPU comes each
    second), and leave time for just this."""
    steps = run.console.state.step
    if run._observer is None or not run.plan.snapshots or not run.console.steps_stored < steps:
        return
    run._observer.send(SnapshotWanted())
    interrupts.clear()
    deadline = time.monotonic() + (patience or LAST_SNAPSHOT_S)
    # One that was under way already may be complete first: the next one is of what was computed until now
    while run.console.steps_stored < steps and time.monotonic() < deadline and set(interrupts) <= {*NOTICES}:
        if run._is_over or run.console.failure:
            return
        run._look()
        time.sleep(_POLL_S)
