"""``rallypoint chaos``: the same run twice, undisturbed and with killed processes. Are the bytes the same?"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from rallypoint.config import parse
from rallypoint.core.cluster.terms import copies_of
from rallypoint.core.job import JobRecord
from rallypoint.core.modes import Bytes, Feature
from rallypoint.core.protocol import Applied, Planned
from rallypoint.core.view import ViewNumber
from rallypoint.errors import JobAborted
from rallypoint.launch.console import RunConsole
from rallypoint.launch.engines.cluster import Handle
from rallypoint.launch.folder import not_begun
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import INTERRUPTED, ClusterRun, launch
from rallypoint.store.export import model_state
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.watch.follow import Log
from rallypoint.worker.tensors import state_hash

_WINDOW_S = 20.0  # seconds after a fault in which its stall is searched


class Event(msgspec.Struct, frozen=True):
    """A fault: when (unix time), what, which process, and how much was done by then."""

    at: float
    what: str
    whom: str
    step: int
    again: int


class MeasuredFault(msgspec.Struct, frozen=True):
    """A fault and its cost: the longest time without a finished step after it, and the replicas computed again."""

    event: Event
    stall: float
    again: int


class RoundsLedger(msgspec.Struct, frozen=True):
    """Every round of the run, as the holders of the first shard recorded it: how often, with how many contributions.

    A round is one step, or several under local steps. `samples` is the number that all rounds use. `times`: when each
    round was finished (unix time), ascending: once for each time that it was made, however many servers report it.
    """

    rounds: int
    samples: int
    missing: list[int]
    wrong: list[int]
    times: list[float]

    @property
    def exact(self) -> bool:
        """True if every round was applied, each with all of its contributions."""
        return not self.missing and not self.wrong


class ChaosReport(msgspec.Struct, frozen=True):
    """The whole report.

    `hashes`: of the undisturbed run's weights and of this run's; they must be equal if `comparable`.
    """

    events: list[MeasuredFault]
    undone: int
    hashes: tuple[str, str]
    ledger: RoundsLedger
    comparable: bool = True

    @property
    def same(self) -> bool:
        """True if both runs ended with the same bytes."""
        return self.hashes[0] == self.hashes[1]


def ledger_of(folder: Path, rounds: int, samples: int) -> RoundsLedger:
    """Read the ledger of a run from its event log."""
    applied: dict[int, set[int]] = {}
    times: dict[tuple[int, ViewNumber], float] = {}  # by round and generation: a roll-back makes a round once more
    replicas = 0
    log = Log(folder)
    for message, _ in itertools.chain.from_iterable(iter(log.piece, None)):
        match message:
            case Planned():
                replicas = message.replicas
            case Applied(step=step, at=at):
                applied.setdefault(step, set()).add(message.replicas)
                made = (step, message.generation)
                times[made] = min(at, times.get(made, at))  # the backup of the first shard reports it later
    return RoundsLedger(
        rounds=rounds, samples=samples, missing=[r for r in range(rounds) if r not in applied],
        wrong=[r for r in range(rounds) if r in applied and applied[r] != {replicas}], times=sorted(times.values()),
    )  # fmt: skip


def measure(events: Sequence[Event], ledger: RoundsLedger) -> list[MeasuredFault]:
    """Return the cost of every fault, measured until the next one."""
    measured = []
    for event, following in zip(events, [*events[1:], None], strict=True):
        end = min(event.at + _WINDOW_S, following.at if following is not None else float("inf"))
        again = (following.again if following is not None else event.again) - event.again
        measured.append(MeasuredFault(event, longest_gap(ledger.times, event.at, end), max(0, again)))
    return measured


def longest_gap(times: Sequence[float], start: float, end: float) -> float:
    """Return the longest time without a finished step that ends between `start` and `end`, in seconds.

    A longer stall, which lasts until the next fault at `end`, belongs to that fault.
    """
    first = max(0, bisect.bisect_left(times, start) - 1)
    reaching = itertools.takewhile(lambda gap: gap[1] <= end, itertools.pairwise(times[first:]))
    return max((b - a for a, b in reaching), default=0.0)


def typical_gap(times: Sequence[float]) -> float:
    """Return the median time between two finished steps, in seconds."""
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    return gaps[len(gaps) // 2] if gaps else 0.0


def show(report: ChaosReport, console: Console) -> None:
    table = Table("", "step", "fault", "to", "stall", "computed again")
    for number, measured in enumerate(report.events, 1):
        event = measured.event
        table.add_row(
            str(number), str(event.step), event.what, event.whom, f"{measured.stall:.2f} s", str(measured.again)
        )
    console.print(table)
    usual = typical_gap(report.ledger.times)
    console.print(f"longest time without a step, beside the {usual:.2f} s that a step usually takes:")
    for what in sorted({measured.event.what for measured in report.events}):
        stalls = sorted(m.stall for m in report.events if m.event.what == what)
        console.print(f"  {what} ({len(stalls)}): p50 {stalls[len(stalls) // 2]:.2f} s, max {stalls[-1]:.2f} s")
    if report.comparable:
        _show_ledger(report.ledger, console)
    mine, theirs = report.hashes
    verdict = "[bold green]same bytes: yes[/bold green]" if report.same else "[bold red]same bytes: NO[/bold red]"
    if not report.comparable:
        verdict = f"same bytes: {'yes' if report.same else 'no'} (this mode does not promise them when workers die)"
    if report.undone:
        verdict += f"; [yellow]but {report.undone} faults were not made: the run was over, give it more steps[/yellow]"
    console.print(f"undisturbed sha256 {mine}\nthis run    sha256 {theirs}\n{verdict}")


def _show_ledger(ledger: RoundsLedger, console: Console) -> None:
    if ledger.exact:
        console.print(
            f"ledger: {ledger.rounds} updates, each applied with all of its contributions; "
            f"{ledger.samples:,} sample positions, each used once"
        )
        return
    console.print(
        f"[bold red]ledger: updates missing {ledger.missing[:10]}, "
        f"with other contributions than they should {ledger.wrong[:10]}[/bold red]"
    )


_SETTLE_S = 15.0  # seconds after which the next fault comes, even if the cluster has not recovered from the last one
_SPREAD_S = 0.6  # seconds: each fault comes at a random time within so long of when it could


class _EverythingDied(Exception):
    """We have killed all processes at once."""


def random_faults(
    kills: int, resizes: Sequence[int], everything: bool, seed: int, servers: int, aggregators: int
) -> list[str]:
    """Return a schedule of faults: kill worker|server|aggregator|coordinator, stop worker, resize N, everything.

    Kills are spread over workers, servers (if there are two), aggregators and coordinator; one stop of a worker, and
    the rest, are between them.
    """
    rng = random.Random(seed)
    shares = [("worker", 5), ("coordinator", 1), *([("server", 4)] if servers > 1 else [])]
    shares += [("aggregator", 2)] if aggregators else []
    total = sum(share for _, share in shares)
    faults = [f"kill {role}" for role, share in shares for _ in range(kills * share // total)]
    faults += ["kill worker" for _ in range(kills - len(faults))]
    faults.append("stop worker")
    rng.shuffle(faults)
    for index, size in enumerate(resizes):
        faults.insert((index + 1) * len(faults) // (len(resizes) + 1), f"resize {size}")
    if everything:
        faults.insert(len(faults) // 2, "everything")
    return faults


class Chaos:
    """Causes the faults in a run, one after the other, each when the cluster has recovered from the last."""

    def __init__(self, faults: Sequence[str], steps: int, seed: int) -> None:
        self._faults, self._steps = list(faults), steps
        self._total = len(self._faults)
        self._random = random.Random(seed)
        self._last = time.monotonic()
        self._strike_at: float | None = None
        self._stopped: list[tuple[float, Handle]] = []
        self.events: list[Event] = []

    @property
    def left(self) -> int:
        """The number of faults for which there was no time."""
        return len(self._faults)

    def intervene(self, run: ClusterRun) -> None:
        """Cause the next fault if it is due. The launcher calls this repeatedly during the run."""
        self._wake(run)
        over = run.console.finished or run.console.failure or run.failure
        if not self._faults or over or not self._due(run):
            return
        if self._strike_at is None:  # a random delay: not always at the same moment of a step
            self._strike_at = time.monotonic() + self._random.uniform(0.0, _SPREAD_S)
        if time.monotonic() < self._strike_at:
            return
        self._strike_at = None
        fault = self._faults.pop(0)
        self._last = time.monotonic()
        whom = self._strike(fault, run)
        number = f"{len(self.events) + 1}/{self._total}"
        run.console.console.print(f"[bold red]chaos[/bold red] {number}: {fault} {whom}")
        self.events.append(Event(time.time(), fault, whom, run.console.state.step, run.console.state.again))
        if fault == "everything":
            raise _EverythingDied

    def _due(self, run: ClusterRun) -> bool:
        done = self._total - len(self._faults)
        if run.console.state.step < (done + 1) * self._steps // (self._total + 2):
            return False
        return self._recovered(run) or time.monotonic() - self._last > _SETTLE_S

    def _recovered(self, run: ClusterRun) -> bool:
        """True if all members are back, and every shard that should be is on two servers."""
        members = run.console.state.view
        if members is None or self._stopped:
            return False
        workers = len(members.workers) + len(members.standby)
        safe = run.plan.replication < 2 or members.exposed == 0
        counts = {"worker": workers, "server": len(members.servers), "aggregator": len(members.aggregators)}
        here = all(counts[role] >= wanted for role, wanted in run.supervisor.wanted.items())
        return here and safe and bool(run.of_role("coordinator"))

    def _strike(self, fault: str, run: ClusterRun) -> str:
        match fault.split():
            case "resize", size:
                before = run.supervisor.wanted["worker"] - run.plan.standby
                run.resize(int(size))
                return f"from {before}"
            case how, role:
                return self._hit(role, run, kills=how == "kill")
            case _:
                for handle in run.handles.values():
                    handle.signal(signal.SIGKILL)
                return "processes at once"

    def _hit(self, role: str, run: ClusterRun, *, kills: bool) -> str:
        alive = run.of_role(role)
        busy = set(run.console.state.view.workers) if run.console.state.view is not None else set()
        computing = [handle for handle in alive if handle.command.name in busy]
        if not alive:
            return "(nobody there)"
        victim = self._random.choice(computing or alive)
        if kills:
            victim.signal(signal.SIGKILL)
        else:
            victim.signal(signal.SIGSTOP)
            self._stopped.append((time.monotonic() + 2 * run.plan.heartbeat, victim))
        return victim.command.name

    def _wake(self, run: ClusterRun) -> None:
        for when, handle in list(self._stopped):
            if time.monotonic() >= when:
                handle.signal(signal.SIGCONT)
                self._stopped.remove((when, handle))
                run.console.console.print(f"[bold red]chaos[/bold red]: {handle.command.name} may go on")


def chaos(
    plan: Launch, faults: Sequence[str], seed: int, console: Console, *, json: Path | None = None,
    overwrite: bool = False, made: bool = False,
) -> int:  # fmt: skip
    """Run `plan` undisturbed and then under `faults`; print the table and the verdict.

    `overwrite`, `made`: see `launch`. Returns 0 if the bytes are the same, or if the job's mode does not promise that.
    """
    folder = Path(plan.folder)
    with not_begun(folder) if made or not folder.exists() else contextlib.nullcontext():
        undisturbed = _undisturbed(plan, console, overwrite=overwrite)
    job, hash = _last_of(undisturbed)
    config = parse(job.config)
    why = job.refusal_of({Feature.REPLICATION})
    copies = copies_of(plan.replication, plan.servers)
    if copies > 1 and why:
        console.print(f"every shard is on one server ({why})")
    plan = msgspec.structs.replace(plan, replication=1 if why else copies)
    console.rule(f"and now with {len(faults)} faults")
    driver = Chaos(faults, config.steps, seed)
    status = _under(plan, driver, console, overwrite=overwrite)
    if status != 0:
        return status
    samples = config.steps * config.replicas * config.batch
    ledger = ledger_of(Path(plan.folder), config.rounds, samples)
    report = ChaosReport(
        events=measure(driver.events, ledger), undone=driver.left, hashes=(hash, _last_of(plan)[1]),
        ledger=ledger, comparable=config.mode.bytes is Bytes.ALWAYS,
    )
    show(report, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    if not report.comparable:
        return 0  # then neither the bytes nor the contributors are promised
    return 0 if report.same and report.ledger.exact else 1


def _undisturbed(plan: Launch, console: Console, *, overwrite: bool) -> Launch:
    """Run the plan without faults: same workers and servers; nothing else, and no regular snapshots."""
    folder = str(Path(plan.folder) / "undisturbed")
    calm = msgspec.structs.replace(
        plan, folder=folder, snapshots=str(Path(folder).resolve() / "snapshots"), standby=0, replication=1,
        snapshot_seconds=0.0, snapshot_steps=0, workers=(1, plan.workers_start), aggregators=0,
    )  # fmt: skip
    console.rule("the undisturbed run")
    status = launch(calm, RunConsole(console), overwrite=overwrite)
    if status == INTERRUPTED:
        raise SystemExit(INTERRUPTED)
    if status != 0:
        raise JobAborted("the undisturbed run has failed: chaos has nothing to compare with")
    return calm


def _under(plan: Launch, driver: Chaos, console: Console, *, overwrite: bool) -> int:
    while True:
        try:
            return launch(plan, RunConsole(console), driver.intervene, overwrite=overwrite and not plan.resume)
        except _EverythingDied:
            manifest = SnapshotStore(plan.snapshots).latest_usable(lambda text: console.print(text, markup=False))
            if manifest is None:
                raise JobAborted("everything was killed before the first snapshot") from None
            console.rule(f"every process is dead: resuming from {manifest.id}")
            plan = msgspec.structs.replace(plan, resume=manifest.id)


def _last_of(plan: Launch) -> tuple[JobRecord, str]:
    """Return the job of the plan's last snapshot, and the hash of the model in it, without what is frozen."""
    store = SnapshotStore(plan.snapshots)
    manifest = store.latest_usable(lambda text: None)
    assert manifest is not None
    return manifest.job, state_hash(model_state(store, manifest))
