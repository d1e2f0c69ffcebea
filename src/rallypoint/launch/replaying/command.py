"""``rallypoint replay``: computes a step of a run again on this machine, in a folder of its own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.coordinator.journal import JOURNAL, kept_state
from rallypoint.coordinator.recording.fingerprints import KeptFingerprints
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.job import JobRecord
from rallypoint.core.modes import Feature
from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.launch.code.kept import CODE, worker_argv
from rallypoint.launch.code.trusted import refuse_others_script, refuse_others_words
from rallypoint.launch.plan import Launch, read_plan
from rallypoint.launch.replaying import comparing
from rallypoint.launch.replaying.losses import Spike, first_spike, recorded_losses
from rallypoint.launch.replaying.task import Answer, Looked, Probed, Task
from rallypoint.observe.lines import printable
from rallypoint.store.manifest import Manifest
from rallypoint.store.snapshots import SnapshotStore


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to replay.

    Attributes:
        step: the step; -1: the first whose recorded loss stands out.
        replica: which of its replicas; -1: all.
        debug: open the debugger in the forward pass of that replica.
        on_cpu: hide the GPUs.
        current: run the script as it is now, not the copy that the run has kept.
        quiet: what the script prints goes to the error stream.
    """

    step: int = -1
    replica: int = -1
    debug: bool = False
    on_cpu: bool = False
    current: bool = False
    quiet: bool = False


class Replica(msgspec.Struct, frozen=True):
    """What was seen of a replica, and how it compares."""

    seen: Looked
    compared: comparing.Compared


class Replayed(msgspec.Struct, frozen=True):
    """The result.

    Attributes:
        step, snapshot, computed: the step, where the replay began, and how many steps it computed before that one.
        device: on which the script computed now.
        loss, recorded_loss: of the step, now and then, as texts; "" if it is not known.
        replicas: what was looked at.
        version: the version after the step.
        departs: where the replay first differs from the record, as a phrase; "": nowhere.
        spike, usual: why this step, with --find-spike: its loss, and the median of those before.
        probed: where its loss comes from.
    """

    step: int
    snapshot: str
    computed: int
    device: str
    loss: str
    recorded_loss: str
    replicas: tuple[Replica, ...]
    version: comparing.Version
    departs: str = ""
    spike: str = ""
    usual: str = ""
    probed: Probed | None = None


def replay(run: Path, wanted: Wanted, say: Callable[[str], None]) -> Replayed:
    """Replay a step of the run in this folder, which is only read. `say` gets a sentence about what is computed.

    Raises UsageError when it cannot be replayed, and says why; DataError for a folder that is not a run's.
    """
    refuse_others_words(run, "replaying")
    plan = read_plan(run)
    spike = _spike_of(run) if wanted.step < 0 else None
    step = wanted.step if spike is None else spike.step
    manifest = _nearest(plan, run, step)
    _check(manifest.job, step, wanted.replica)
    if plan.ranks > 1:
        raise UsageError(f"the workers of {run} were groups of {plan.ranks} ranks: replays start one process only")
    argv = _argv(plan, run, say, current=wanted.current)
    state = kept_state(run)
    reductions = _reductions(manifest, run, state)
    say(f"from snapshot {printable(manifest.id)}: {_steps(step - manifest.version)} to step {step}")
    with tempfile.TemporaryDirectory(prefix="rallypoint-replay-") as folder:
        task = Task(
            snapshots=_place(plan.snapshots), snapshot=manifest.id, step=step, replica=wanted.replica,
            settings=_settings(manifest.job), reductions=reductions, folder=folder,
            answer=str(Path(folder) / "answer.json"), debug=wanted.debug, probe=spike is not None,
        )  # fmt: skip
        answer = _computed(argv, task, manifest.job.threads or plan.threads_at_first, wanted)
        return _compared(run, task, manifest, answer, spike)


def _spike_of(run: Path) -> Spike:
    spike = first_spike(recorded_losses(run))
    if spike is None:
        raise UsageError(f"no loss in {run / 'events.jsonl'} stands out: name a step with --step")
    return spike


def _nearest(plan: Launch, run: Path, step: int) -> Manifest:
    """The newest snapshot at or before the step."""
    if not plan.snapshots:
        raise UsageError(f"{run} was started with --snapshots none: there is nothing to begin a replay with")
    manifests = SnapshotStore(_place(plan.snapshots)).manifests()
    before = [manifest for manifest in manifests if manifest.version <= step]
    if before:
        return max(before, key=lambda manifest: manifest.version)
    if not manifests:
        raise UsageError(f"{run} has no usable snapshot in {plan.snapshots}: there is nothing to begin a replay with")
    oldest = min(manifest.version for manifest in manifests)
    raise UsageError(
        f"the oldest snapshot of {run} is of step {oldest}, and a replay of step {step} needs an earlier one: "
        "older ones were deleted (--keep-last, --keep-every)"
    )


def _check(job: JobRecord, step: int, replica: int) -> None:
    if why := job.refusal_of({Feature.FINGERPRINTS}):
        raise UsageError(why.replace(f"{Feature.FINGERPRINTS.value} is", "a replay is", 1))
    if step >= job.rounds:
        raise UsageError(f"the job has {job.rounds} steps: the last one is step {job.rounds - 1}")
    replicas = int(job.config["replicas"])
    if replica >= replicas:
        raise UsageError(f"the job has {replicas} replicas, 0 to {replicas - 1}: there is no replica {replica}")


def _argv(plan: Launch, run: Path, say: Callable[[str], None], *, current: bool) -> tuple[str, ...]:
    if not plan.script or current:
        if whose := refuse_others_script(plan, "replaying", "leave --current-code out"):
            say(whose)
        return plan.worker
    kept = run / CODE / Path(plan.script).name
    if not kept.is_file():
        raise UsageError(
            f"{run} has not kept the code of {plan.script} ({kept} is not there): --current-code runs the script as it "
            "is now"
        )
    return worker_argv(plan.worker, plan.script, run)


def _settings(job: JobRecord) -> dict[str, Any]:
    """Settings that change no byte: everything is recorded, a loss that is not finite is looked at and ends nothing."""
    settings: dict[str, Any] = {"fingerprints": 1, "overlap": False}
    if job.config.get("nonfinite") == "stop" and job.config.get("precision") != "fp16":
        settings["nonfinite"] = "continue"
    if job.config.get("keep_best"):
        settings["keep_best"] = ""
    return settings


def _reductions(manifest: Manifest, run: Path, state: ClusterState | None) -> tuple[int, ...]:
    """From which versions on the run has reduced its rates (`plateau`): the snapshot says it of earlier ones alone."""
    if manifest.job.config.get("plateau") is None:
        return ()
    if state is None:
        raise UsageError(f"{run} has no {JOURNAL}, which says at which steps the rates were reduced (plateau=)")
    return tuple(sorted({*manifest.decided.reductions, *state.decided.reductions}))


def _place(url: str) -> str:
    return url if "://" in url else str(Path(url).resolve())


def _computed(argv: tuple[str, ...], task: Task, threads: int, wanted: Wanted) -> Answer:
    order = Path(task.folder) / "task.json"
    order.write_bytes(msgspec.json.encode(task))
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT_")}
    ours |= {environment.REPLAY: str(order), **environment.with_threads(threads)}
    if wanted.on_cpu:
        ours["CUDA_VISIBLE_DEVICES"] = ""
    sys.stdout.flush()
    try:
        done = subprocess.run(
            argv, env=ours, stdin=None if wanted.debug else subprocess.DEVNULL, check=False,
            stdout=sys.stderr.fileno() if wanted.quiet else None,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"the script cannot be started: {argv[0]}: {error.strerror}") from None
    answer = Path(task.answer)
    if not answer.exists():
        raise UsageError(f"the script ended with status {done.returncode} before step {task.step}: see above")
    return msgspec.json.decode(answer.read_bytes(), type=Answer)


def _compared(run: Path, task: Task, manifest: Manifest, answer: Answer, spike: Spike | None) -> Replayed:
    layout, now_in = manifest.job.layout, Path(task.folder)
    then_losses, now_losses = recorded_losses(run), recorded_losses(now_in)
    with KeptFingerprints(run) as then, KeptFingerprints(now_in) as now:
        replicas = tuple(
            Replica(seen, comparing.contribution(layout, then, now, task.step, seen.replica))
            for seen in answer.replicas
        )
        steps = range(manifest.version, task.step + 1)
        departs = comparing.first_difference(layout, then, now, steps) or _other_loss(then_losses, now_losses, steps)
        version = comparing.version(layout, then, now, task.step + 1)
    return Replayed(
        task.step, manifest.id, task.step - manifest.version, answer.device, _text(now_losses, task.step),
        _text(then_losses, task.step), replicas, version, departs, "" if spike is None else repr(spike.loss),
        "" if spike is None or math.isnan(spike.usual) else repr(spike.usual), answer.probed,
    )  # fmt: skip


def _other_loss(then: dict[int, float], now: dict[int, float], steps: range) -> str:
    for step in steps:
        if step in then and step in now and repr(then[step]) != repr(now[step]):
            return f"the loss of step {step}, which was {then[step]!r} and is {now[step]!r}"
    return ""


def _text(losses: dict[int, float], step: int) -> str:
    return repr(losses[step]) if step in losses else ""


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"
