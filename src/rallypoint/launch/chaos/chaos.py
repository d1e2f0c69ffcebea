"""``rallypoint chaos``: the same run twice, undisturbed and while its processes are killed: the same bytes?"""

from __future__ import annotations

import hashlib
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from rallypoint.config import JobConfig, parse
from rallypoint.core.modes import Bytes
from rallypoint.errors import ConfigError, JobAborted
from rallypoint.launch.chaos.report import Event, Report, ledger_of, measure, show
from rallypoint.launch.cluster import Handle
from rallypoint.launch.console import RunConsole
from rallypoint.launch.launcher import INTERRUPTED, launch
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import ClusterRun
from rallypoint.store.export import model_state
from rallypoint.store.snapshots import SnapshotStore

_SETTLE_S = 15.0  # after so long the next fault comes although the cluster has not recovered from the last one
_SPREAD_S = 0.6  # faults come at any time within so long of when they could
_ROLES = ("worker", "server", "coordinator")


class Fault(msgspec.Struct, frozen=True):
    """Something to do to the cluster: `what` is kill worker|server|coordinator, stop worker, resize N or everything."""

    what: str

    @property
    def kind(self) -> str:
        """kill, stop, resize or everything."""
        return self.what.split()[0]

    @property
    def object(self) -> str:
        """The role that is hit, or the number to resize to."""
        return self.what.partition(" ")[2]


class _EverythingDied(Exception):
    """All processes were killed at once, by us."""


def parse_faults(text: str) -> list[Fault]:
    """``kill worker, resize 4, kill server``: a schedule as one writes it. ConfigError when it is none."""
    faults = [Fault(" ".join(part.split())) for part in text.split(",") if part.strip()]
    for fault in faults:
        fits = (
            (fault.kind in ("kill", "stop") and fault.object in _ROLES)
            or (fault.kind == "resize" and fault.object.isdigit() and int(fault.object) > 0)
            or fault.what == "everything"
        )
        if not fits:
            raise ConfigError(
                f"'{fault.what}' is nothing that chaos can do: say kill or stop worker, server or coordinator, "
                "resize 4, or everything"
            )
    return faults


def random_faults(
    kills: int, resizes: Sequence[int], stops: int, everything: bool, servers: int, seed: int
) -> list[Fault]:
    """A schedule: kills spread over workers, servers (if there are two) and the coordinator, the rest in between."""
    rng = random.Random(seed)
    shares = [("worker", 5), ("coordinator", 1), *([("server", 4)] if servers > 1 else [])]
    total = sum(share for _, share in shares)
    faults = [Fault(f"kill {role}") for role, share in shares for _ in range(kills * share // total)]
    faults += [Fault("kill worker") for _ in range(kills - len(faults))]
    faults += [Fault("stop worker") for _ in range(stops)]
    rng.shuffle(faults)
    for index, size in enumerate(resizes):
        faults.insert((index + 1) * len(faults) // (len(resizes) + 1), Fault(f"resize {size}"))
    if everything:
        faults.insert(len(faults) // 2, Fault("everything"))
    return faults


class Chaos:
    """Makes the faults in a run, one after the other, each once the cluster has recovered from the last."""

    def __init__(self, faults: Sequence[Fault], steps: int, seed: int) -> None:
        self._faults, self._steps = list(faults), steps
        self._total = len(self._faults)
        self._random = random.Random(seed)
        self._last = time.monotonic()
        self._strike_at: float | None = None
        self._stopped: list[tuple[float, Handle]] = []
        self.events: list[Event] = []

    @property
    def left(self) -> int:
        """Faults that there was no time for."""
        return len(self._faults)

    def intervene(self, run: ClusterRun) -> None:
        """Called again and again while the run goes on."""
        self._wake(run)
        if not self._faults or not self._due(run):
            return
        if self._strike_at is None:  # not always at the same moment of a step
            self._strike_at = time.monotonic() + self._random.uniform(0.0, _SPREAD_S)
        if time.monotonic() < self._strike_at:
            return
        self._strike_at = None
        fault = self._faults.pop(0)
        self._last = time.monotonic()
        whom = self._strike(fault, run)
        number = f"{len(self.events) + 1}/{self._total}"
        run.console.console.print(f"[bold red]chaos[/bold red] {number}: {fault.what} {whom}")
        self.events.append(Event(time.time(), fault.what, whom, run.console.steps_done, run.console.again))
        if fault.kind == "everything":
            raise _EverythingDied

    def _due(self, run: ClusterRun) -> bool:
        done = self._total - len(self._faults)
        if run.console.steps_done < (done + 1) * self._steps // (self._total + 2):
            return False
        return self._recovered(run) or time.monotonic() - self._last > _SETTLE_S

    def _recovered(self, run: ClusterRun) -> bool:
        """Is everybody here again, and every shard on two servers if it is to be?"""
        members = run.console.members
        if members is None or self._stopped:
            return False
        workers = len(members.workers) + len(members.standby)
        safe = run.plan.replication < 2 or members.exposed == 0
        here = workers >= run.workers_wanted and len(members.servers) >= run.servers_wanted
        return here and safe and bool(run.of_role("coordinator"))

    def _strike(self, fault: Fault, run: ClusterRun) -> str:
        match fault.kind:
            case "kill" | "stop":
                return self._hit(fault, run)
            case "resize":
                return self._resize(int(fault.object), run)
            case _:
                for handle in run.handles.values():
                    handle.signal(signal.SIGKILL)
                return "processes at once"

    def _hit(self, fault: Fault, run: ClusterRun) -> str:
        alive = run.of_role(fault.object)
        busy = set(run.console.members.workers) if run.console.members is not None else set()
        computing = [handle for handle in alive if handle.command.name in busy]
        if not alive:
            return "(nobody there)"
        victim = self._random.choice(computing or alive)
        if fault.kind == "kill":
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

    def _resize(self, size: int, run: ClusterRun) -> str:
        before = run.workers_wanted - run.plan.standby
        run.resize(size)
        return f"from {before}"


def chaos(
    plan: Launch, faults: Sequence[Fault], seed: int, console: Console, *, json: Path | None = None,
    overwrite: bool = False,
) -> int:  # fmt: skip
    """Run `plan` undisturbed and then under `faults`; print the table and the verdict.

    0 if the bytes are the same, or the job's mode promises no such thing.
    """
    undisturbed = _undisturbed(plan, console, overwrite=overwrite)
    config = _config_of(undisturbed)
    console.rule(f"and now with {len(faults)} faults")
    driver = Chaos(faults, config.steps, seed)
    status = _under(plan, driver, console, overwrite=overwrite)
    if status != 0:
        return status
    samples = config.steps * config.replicas * config.batch
    ledger = ledger_of(Path(plan.folder), config.rounds, samples)
    report = Report(
        events=measure(driver.events, ledger), undone=driver.left, hashes=(_hash(undisturbed), _hash(plan)),
        ledger=ledger, comparable=config.mode.bytes is Bytes.ALWAYS,
    )
    show(report, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    if not report.comparable:
        return 0  # neither bytes nor who contributes is promised then
    return 0 if report.same and report.ledger.exact else 1


def _undisturbed(plan: Launch, console: Console, *, overwrite: bool) -> Launch:
    """The undisturbed run, with as many workers and servers and nothing of what makes it survive."""
    folder = str(Path(plan.folder) / "undisturbed")
    calm = msgspec.structs.replace(
        plan, folder=folder, snapshots=str(Path(folder).resolve() / "snapshots"), standby=0, replication=1,
        snapshot_seconds=0.0, snapshot_steps=0, workers=(1, plan.workers_start),
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
            manifest = SnapshotStore(plan.snapshots).latest_usable(lambda text: console.print(text))
            if manifest is None:
                raise JobAborted("everything was killed before the first snapshot") from None
            console.rule(f"every process is dead: resuming from {manifest.id}")
            plan = msgspec.structs.replace(plan, resume=manifest.id)


def _config_of(plan: Launch) -> JobConfig:
    """The settings of the job that a plan's last snapshot is of."""
    manifest = SnapshotStore(plan.snapshots).latest_usable(lambda text: None)
    assert manifest is not None
    return parse(manifest.job.config)


def _hash(plan: Launch) -> str:
    """sha256 of the names and bytes of the model in the last snapshot."""
    store = SnapshotStore(plan.snapshots)
    manifest = store.latest_usable(lambda text: None)
    assert manifest is not None
    digest = hashlib.sha256(f"version {manifest.version}".encode())
    for name, tensor in sorted(model_state(store, manifest).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()
