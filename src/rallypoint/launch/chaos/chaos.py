"""``rallypoint chaos``: the same run twice, undisturbed and with killed processes. Are the bytes the same?"""

from __future__ import annotations

import contextlib
import hashlib
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from rallypoint.config import parse
from rallypoint.core.cluster.terms import copies_of
from rallypoint.core.job import JobRecord
from rallypoint.core.modes import Bytes, Feature
from rallypoint.errors import JobAborted
from rallypoint.launch.chaos.report import Event, Report, ledger_of, measure, show
from rallypoint.launch.console import RunConsole
from rallypoint.launch.engines.cluster import Handle
from rallypoint.launch.folder import not_begun
from rallypoint.launch.launcher import INTERRUPTED, launch
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import ClusterRun
from rallypoint.store.export import model_state
from rallypoint.store.snapshots import SnapshotStore

_SETTLE_S = 15.0  # seconds after which the next fault comes, even if the cluster has not recovered from the last one
_SPREAD_S = 0.6  # seconds: each fault comes at a random time within so long of when it could


class Fault(msgspec.Struct, frozen=True):
    """A fault to cause. `what` is kill worker|server|aggregator|coordinator, stop worker, resize N or everything."""

    what: str

    @property
    def kind(self) -> str:
        """Return kill, stop, resize or everything."""
        return self.what.split()[0]

    @property
    def object(self) -> str:
        """Return the role that is hit, or the number of workers to resize to."""
        return self.what.partition(" ")[2]


class _EverythingDied(Exception):
    """We have killed all processes at once."""


def random_faults(
    kills: int, resizes: Sequence[int], everything: bool, seed: int, servers: int, aggregators: int
) -> list[Fault]:
    """Return a schedule: kills spread over workers, servers (if there are two), aggregators and coordinator; one stop
    of a worker, and the rest, between them."""
    rng = random.Random(seed)
    shares = [("worker", 5), ("coordinator", 1), *([("server", 4)] if servers > 1 else [])]
    shares += [("aggregator", 2)] if aggregators else []
    total = sum(share for _, share in shares)
    faults = [Fault(f"kill {role}") for role, share in shares for _ in range(kills * share // total)]
    faults += [Fault("kill worker") for _ in range(kills - len(faults))]
    faults.append(Fault("stop worker"))
    rng.shuffle(faults)
    for index, size in enumerate(resizes):
        faults.insert((index + 1) * len(faults) // (len(resizes) + 1), Fault(f"resize {size}"))
    if everything:
        faults.insert(len(faults) // 2, Fault("everything"))
    return faults


class Chaos:
    """Causes the faults in a run, one after the other, each when the cluster has recovered from the last."""

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
        """The number of faults for which there was no time."""
        return len(self._faults)

    def intervene(self, run: ClusterRun) -> None:
        """Cause the next fault if it is due. The launcher calls this repeatedly during the run."""
        self._wake(run)
        if not self._faults or not self._due(run):
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
        run.console.console.print(f"[bold red]chaos[/bold red] {number}: {fault.what} {whom}")
        self.events.append(Event(time.time(), fault.what, whom, run.console.state.step, run.console.state.again))
        if fault.kind == "everything":
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
        here = workers >= run.workers_wanted and len(members.servers) >= run.servers_wanted
        here = here and len(members.aggregators) >= run.supervisor.wanted["aggregator"]
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
        busy = set(run.console.state.view.workers) if run.console.state.view is not None else set()
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
    overwrite: bool = False, made: bool = False,
) -> int:  # fmt: skip
    """Run `plan` undisturbed and then under `faults`; print the table and the verdict.

    `overwrite`, `made`: see `launch`. Returns 0 if the bytes are the same, or if the job's mode does not promise that.
    """
    folder = Path(plan.folder)
    with not_begun(folder) if made or not folder.exists() else contextlib.nullcontext():
        undisturbed = _undisturbed(plan, console, overwrite=overwrite)
    job = _job_of(undisturbed)
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
    report = Report(
        events=measure(driver.events, ledger), undone=driver.left, hashes=(_hash(undisturbed), _hash(plan)),
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
            manifest = SnapshotStore(plan.snapshots).latest_usable(lambda text: console.print(text))
            if manifest is None:
                raise JobAborted("everything was killed before the first snapshot") from None
            console.rule(f"every process is dead: resuming from {manifest.id}")
            plan = msgspec.structs.replace(plan, resume=manifest.id)


def _job_of(plan: Launch) -> JobRecord:
    """Return the job of the plan's last snapshot."""
    manifest = SnapshotStore(plan.snapshots).latest_usable(lambda text: None)
    assert manifest is not None
    return manifest.job


def _hash(plan: Launch) -> str:
    """Return the sha256 of the names and bytes of the model in the last snapshot."""
    store = SnapshotStore(plan.snapshots)
    manifest = store.latest_usable(lambda text: None)
    assert manifest is not None
    digest = hashlib.sha256(f"version {manifest.version}".encode())
    for name, tensor in sorted(model_state(store, manifest).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()
