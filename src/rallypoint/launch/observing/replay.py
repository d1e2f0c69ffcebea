"""``rallypoint replay``: computes a step of a run again on this machine, in a folder of its own.

``rallypoint replay RUN RUN`` compares the digests that two runs have recorded.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from rallypoint.coordinator.fingerprints import KeptFingerprints
from rallypoint.coordinator.journal import JOURNAL, kept_state
from rallypoint.core import layout as layouts
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Layout
from rallypoint.core.modes import Feature
from rallypoint.core.sums import DIGEST_BYTES, dense_shards, pieces_of
from rallypoint.core.typed import counted, named, printable
from rallypoint.errors import DataError, UsageError
from rallypoint.launch import environment
from rallypoint.launch.kept_code import CODE, refuse_others_script, refuse_others_words, worker_argv
from rallypoint.launch.plan import Launch, read_plan
from rallypoint.store.manifest import Manifest
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.watch.follow import recorded_losses

_UNKNOWN = bytes(DIGEST_BYTES)


class ComparedDigests(msgspec.Struct, frozen=True):
    """A replica's contribution: what its shards have, then and now."""

    worker: str  # who computed it then; "" if the run has recorded nothing of it
    digests: dict[int, str]  # those of the replay, in hexadecimal, by shard
    # `equal`, `unknown`: how many shards have the recorded digest, and of how many none is recorded
    equal: int
    unknown: int
    differ: dict[int, tuple[str, ...]]  # the shards that have another one, each with its tensors


class Version(msgspec.Struct, frozen=True):
    """A version, then and now: how many pieces of tensors are equal, and the names of the tensors that are not."""

    version: int
    equal: int
    differ: tuple[str, ...]


def compared_contribution(
    layout: Layout, then: KeptFingerprints, now: KeptFingerprints, step: int, replica: int
) -> ComparedDigests:
    shards, names = dense_shards(layout), pieces_of(layout)
    recorded, found = then.contributions(step).get(replica), now.contributions(step).get(replica)
    ours = cut(found.digests, len(shards)) if found is not None else [_UNKNOWN] * len(shards)
    theirs = cut(recorded.digests, len(shards)) if recorded is not None else [_UNKNOWN] * len(shards)
    known = [(s, a, b) for s, a, b in zip(shards, ours, theirs, strict=True) if _UNKNOWN not in (a, b)]
    differ = {shard: tuple(piece.name for piece in names[shard]) for shard, a, b in known if a != b}
    digests = {shard: digest.hex() for shard, digest in zip(shards, ours, strict=True)}
    worker = "" if recorded is None else recorded.worker
    return ComparedDigests(worker, digests, len(known) - len(differ), len(shards) - len(known), differ)


def compared_version(layout: Layout, then: KeptFingerprints, now: KeptFingerprints, number: int) -> Version:
    equal, differ = 0, dict[str, None]()
    theirs, ours = then.version(number), now.version(number)
    for shard, pieces in enumerate(pieces_of(layout)):
        if shard in theirs and shard in ours:
            for piece, a, b in zip(pieces, *(cut(of[shard], len(pieces)) for of in (ours, theirs)), strict=True):
                equal += a == b
                if a != b:
                    differ[piece.name] = None
    return Version(number, equal, tuple(differ))


def first_difference(layout: Layout, one: KeptFingerprints, other: KeptFingerprints, steps: Sequence[int]) -> str:
    """Return the first of these steps at which a replica contributed something else, as a phrase; "": at none."""
    for step in steps:
        ours, theirs = one.contributions(step), other.contributions(step)
        for replica in sorted(ours.keys() & theirs.keys()):
            compared = compared_contribution(layout, one, other, step, replica)
            if compared.differ:
                names = ", ".join(next(iter(compared.differ.values())))
                return f"replica {replica} at step {step} (then on {compared.worker}), first in {names}"
    return ""


def cut(digests: bytes, count: int) -> list[bytes]:
    """Return the single digests. Raises DataError if there are not so many."""
    if len(digests) != count * DIGEST_BYTES:
        raise DataError(f"{len(digests)} bytes of digests are recorded where the model has {count * DIGEST_BYTES}")
    return [digests[n : n + DIGEST_BYTES] for n in range(0, len(digests), DIGEST_BYTES)]


class Difference(msgspec.Struct, frozen=True):
    """What two runs have in common."""

    versions: int  # how many versions both have recorded
    equal: int  # the last version up to which all are equal; -1: none
    version: int  # the first that differs; -1: none does
    parameters: tuple[str, ...]  # the tensors that differ in it
    contribution: str  # the first replica's contribution that differs at or before its step, as a phrase; "": none does


def diff(one: Path, other: Path, step: int = -1) -> Difference:
    """Compare the digests of two runs, whose folders are only read; with `step` those of the version after that step.

    Raises UsageError when they cannot be compared: another model, or nothing that both have recorded.
    """
    layout, theirs = _layout(one), _layout(other)
    if layout.fingerprint != theirs.fingerprint:
        raise UsageError(
            f"{one} and {other} have different models: {_shown(str(layouts.first_difference(theirs, layout)))}"
        )
    with KeptFingerprints(one) as ours, KeptFingerprints(other) as others:
        versions = sorted({*ours.versions()} & {*others.versions()})
        if step >= 0:
            versions = [version for version in versions if version == step + 1]
        if not versions:
            what = "have no version in common of which both recorded digests"
            what = f"have not both recorded digests of version {step + 1}" if step >= 0 else what
            raise UsageError(
                f"{one} and {other} {what}: give both runs the same audit.fingerprints=N (which records N, 2N, ...)"
            )
        equal = -1
        for number in versions:
            compared = compared_version(layout, ours, others, number)
            if compared.differ:
                steps = range(max(equal, 0), number)
                phrase = first_difference(layout, ours, others, steps)
                return Difference(len(versions), equal, number, compared.differ, phrase)
            equal = number
        return Difference(len(versions), equal, -1, (), "")


def words_of(found: Difference) -> str:
    """Return what was found, as a sentence that is `printable`: names of parameters may be somebody else's."""
    if found.version < 0:
        return f"equal: all {found.versions} versions that both have recorded, up to version {found.equal}"
    before = f"equal up to version {found.equal}; " if found.equal >= 0 else ""
    first = f"; the first contribution that differs: {found.contribution}" if found.contribution else ""
    version = f"version {found.version} (after step {found.version - 1})"
    return _shown(f"{before}{version} differs in {named(found.parameters, 8)}{first}")


def _shown(text: str) -> str:
    return printable(text, len(text))


def _layout(run: Path) -> Layout:
    if not (run / JOURNAL).exists():
        raise UsageError(f"{run} is not the folder of a run: there is no {JOURNAL} in it")
    state = kept_state(run)
    if state is None or state.record is None:
        raise UsageError(f"the job in {run} has not begun: nothing is recorded")
    return state.record.layout


_WINDOW, _FEWEST = 32, 5  # steps before a spike that say what is usual
_SPREADS = 8.0  # a spike is so many usual deviations above the median
_LEAST = 0.25  # and at least this share of the median
_SAMPLES, _TENSORS = 64, 12  # that are shown


class ReplayTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that computes is asked for, as a file in a folder of its own."""

    # `snapshots`, `snapshot`: where to begin
    snapshots: str
    snapshot: str
    step: int  # the step to look at
    settings: dict[str, Any] = {}  # settings over those of the run, nested: none changes a byte
    # The versions from which on the run has reduced its rates once more (`plateau`), ascending
    reductions: tuple[int, ...] = ()
    folder: str  # where the replay keeps its log and its digests
    answer: str  # the file for the `ReplayAnswer`


class NotFinite(msgspec.Struct, frozen=True):
    """The first module of a forward pass whose output is not finite.

    `inputs`, `parameters`: whether its inputs and its own parameters are finite.
    """

    module: str
    kind: str
    inputs: bool
    parameters: bool


class Looked(msgspec.Struct, frozen=True):
    """One replica at the step. `samples` are positions in the data set, in the order of the batch."""

    replica: int
    samples: tuple[int, ...]
    not_finite: NotFinite | None


class ReplayAnswer(msgspec.Struct, frozen=True):
    """What the process has seen of all replicas, and on which device it has computed."""

    replicas: tuple[Looked, ...]
    device: str


class Replica(msgspec.Struct, frozen=True):
    """What was seen of a replica, its loss as a text, and how its contribution compares."""

    seen: Looked
    loss: str
    compared: ComparedDigests


class Replayed(msgspec.Struct, frozen=True):
    """The result."""

    # `step`, `snapshot`, `computed`: the step, where the replay began, and how many steps it computed before that one
    step: int
    snapshot: str
    computed: int
    device: str  # on which the script computed now
    # `loss`, `recorded_loss`: of the step, now and then, as texts; "" if it is not known
    loss: str
    recorded_loss: str
    replicas: tuple[Replica, ...]  # what was looked at
    version: Version  # the version after the step
    departs: str = ""  # where the replay first differs from the record, as a phrase; "": nowhere
    # `spike`, `usual`: why this step, with --find-spike: its loss, and the median of those before
    spike: str = ""
    usual: str = ""
    losses: tuple[str, ...] = ()  # with --find-spike, those of all replicas


def replay(
    run: Path, say: Callable[[str], None], *, step: int = -1, replica: int = -1, current: bool = False,
    quiet: bool = False,
) -> Replayed:  # fmt: skip
    """Replay a step of the run in this folder, which is only read. `say` gets a sentence about what is computed.

    `step` -1: the first whose recorded loss stands out. `replica` -1: all, and of a step that stands out the one with
    the highest loss. `current`: with the script as it is now, not the copy that the run has kept. `quiet`: what the
    script prints goes to the error stream.

    Raises UsageError when it cannot be replayed, and says why; DataError for a folder that is not a run's.
    """
    refuse_others_words(run, "replaying")
    plan = read_plan(run)
    spike = first_spike(recorded_losses(run)) if step < 0 else None
    step = step if spike is None else spike.step
    if step < 0:
        raise UsageError(f"no loss in {run / 'events.jsonl'} stands out: name a step with --step")
    manifest = _nearest(plan, run, step)
    _check(manifest.job, step, replica)
    if plan.ranks > 1:
        raise UsageError(f"the workers of {run} were groups of {plan.ranks} ranks: replays start one process only")
    argv = _argv(plan, run, say, current=current)
    state = kept_state(run)
    reductions = _reductions(manifest, run, state)
    say(f"from snapshot {printable(manifest.id)}: {counted(step - manifest.version, 'step')} to step {step}")
    with tempfile.TemporaryDirectory(prefix="rallypoint-replay-") as folder:
        task = ReplayTask(
            snapshots=_place(plan.snapshots), snapshot=manifest.id, step=step, settings=_settings(manifest.job),
            reductions=reductions, folder=folder, answer=str(Path(folder) / "answer.json"),
        )  # fmt: skip
        answer = _computed(argv, task, manifest.job.threads or plan.threads_at_first, quiet=quiet)
        return _compared(run, task, manifest, answer, replica, spike)


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
        "older ones were deleted (--keep-last)"
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
    settings: dict[str, Any] = {"audit": {"fingerprints": 1}, "network": {"overlap": False}}
    if job.config.get("nonfinite") == "stop" and job.config.get("precision") != "fp16":
        settings["nonfinite"] = "continue"
    if job.config.get("evaluation", {}).get("keep_best"):
        settings["evaluation"] = {"keep_best": ""}
    return settings


def _reductions(manifest: Manifest, run: Path, state: ClusterState | None) -> tuple[int, ...]:
    """From which versions on the run has reduced its rates (`plateau`): the snapshot says it of earlier ones alone."""
    if manifest.job.config.get("evaluation", {}).get("plateau") is None:
        return ()
    if state is None:
        raise UsageError(f"{run} has no {JOURNAL}, which says at which steps the rates were reduced (plateau=)")
    return tuple(sorted({*manifest.decided.reductions, *state.decided.reductions}))


def _place(url: str) -> str:
    return url if "://" in url else str(Path(url).resolve())


def _computed(argv: tuple[str, ...], task: ReplayTask, threads: int, *, quiet: bool) -> ReplayAnswer:
    order = Path(task.folder) / "task.json"
    order.write_bytes(msgspec.json.encode(task))
    extra = {environment.REPLAY: str(order), **environment.with_threads(threads)}
    status = environment.run_script(argv, extra, stdout=sys.stderr.fileno() if quiet else None)
    answer = Path(task.answer)
    if not answer.exists():
        raise UsageError(f"the script ended with status {status} before step {task.step}: see above")
    return msgspec.json.decode(answer.read_bytes(), type=ReplayAnswer)


def _compared(
    run: Path, task: ReplayTask, manifest: Manifest, answer: ReplayAnswer, replica: int, spike: Spike | None
) -> Replayed:
    layout, now_in = manifest.job.layout, Path(task.folder)
    then_losses, now_losses = recorded_losses(run), recorded_losses(now_in)
    with KeptFingerprints(run) as then, KeptFingerprints(now_in) as now:
        losses = {number: one.loss for number, one in now.contributions(task.step).items()}
        if spike is not None and losses:
            replica = max(losses, key=lambda number: losses[number] if math.isfinite(losses[number]) else math.inf)
        replicas = tuple(
            Replica(seen, repr(losses.get(seen.replica, math.nan)),
                    compared_contribution(layout, then, now, task.step, seen.replica))
            for seen in answer.replicas if replica in (-1, seen.replica)
        )  # fmt: skip
        steps = range(manifest.version, task.step + 1)
        departs = first_difference(layout, then, now, steps) or _other_loss(then_losses, now_losses, steps)
        version = compared_version(layout, then, now, task.step + 1)
    result = Replayed(
        task.step, manifest.id, task.step - manifest.version, answer.device, _text(now_losses, task.step),
        _text(then_losses, task.step), replicas, version, departs,
    )  # fmt: skip
    if spike is None:
        return result
    usual = "" if math.isnan(spike.usual) else repr(spike.usual)
    of_all = tuple(repr(losses[number]) for number in sorted(losses))
    return msgspec.structs.replace(result, spike=repr(spike.loss), usual=usual, losses=of_all)


def _other_loss(then: dict[int, float], now: dict[int, float], steps: range) -> str:
    for step in steps:
        if step in then and step in now and repr(then[step]) != repr(now[step]):
            return f"the loss of step {step}, which was {then[step]!r} and is {now[step]!r}"
    return ""


def _text(losses: dict[int, float], step: int) -> str:
    return repr(losses[step]) if step in losses else ""


class Spike(NamedTuple):
    """A step whose loss stands out, and the median loss of the steps before it (nan: there are too few)."""

    step: int
    loss: float
    usual: float


def first_spike(losses: Mapping[int, float]) -> Spike | None:
    """Return the first step whose loss is not finite, or far above the median of the 32 steps before; None: no such.

    Far is more than 8 usual deviations (1.4826 times the median distance from the median), and a quarter of the median.
    """
    before: list[float] = []
    for step, loss in losses.items():
        usual = median(before) if len(before) >= _FEWEST else math.nan
        if not math.isfinite(loss):
            return Spike(step, loss, usual)
        if len(before) >= _FEWEST:
            spread = 1.4826 * median(abs(one - usual) for one in before)
            if loss - usual > max(_SPREADS * spread, _LEAST * abs(usual)):
                return Spike(step, loss, usual)
        before = [*before[1 - _WINDOW :], loss]
    return None


def differs(result: Replayed) -> bool:
    """True if the replay has not the recorded bytes."""
    return bool(result.departs or result.version.differ or any(one.compared.differ for one in result.replicas))


def lines_of(result: Replayed) -> Iterator[str]:
    """Yield the lines that say what was seen, each `printable`."""
    for line in _lines(result):
        yield printable(line, len(line))  # a run's folder may be somebody else's


def _lines(result: Replayed) -> Iterator[str]:
    if result.spike:
        usual = f", usually {_short(result.usual)}" if result.usual else ""
        yield f"step {result.step} stands out: its recorded loss is {_short(result.spike)}{usual}"
        losses = ", ".join(map(_short, result.losses))
        yield f"  losses of its replicas 0 to {len(result.losses) - 1}: {losses}"
    recorded = f"recorded {_short(result.recorded_loss)}" if result.recorded_loss else "none is recorded"
    same = " (equal)" if result.loss and result.loss == result.recorded_loss else ""
    yield f"step {result.step}: loss {_short(result.loss) or 'not finite'}, {recorded}{same}; on {result.device}"
    for replica in result.replicas:
        yield from _replica(replica)
    yield _version(result)
    if result.departs:
        yield f"differs from what is recorded: {result.departs}"


def _replica(replica: Replica) -> Iterator[str]:
    seen, compared = replica.seen, replica.compared
    samples = ", ".join(map(str, seen.samples[:_SAMPLES])) + (", ..." if len(seen.samples) > _SAMPLES else "")
    yield f"replica {seen.replica}: loss {_short(replica.loss)}, samples {samples} of the data set"
    if (bad := seen.not_finite) is not None:
        inputs = "its inputs are finite" if bad.inputs else "so are some of its inputs"
        own = "" if bad.parameters else ", and its own parameters are not"
        yield f"  first output that is not finite: {bad.module} ({bad.kind}); {inputs}{own}"
    total = compared.equal + compared.unknown + len(compared.differ)
    if not compared.worker:
        yield f"  contribution: {total} shards; the run has recorded none of this step (fingerprints=)"
    elif compared.differ:
        shard, names = next(iter(compared.differ.items()))
        yield (
            f"  contribution: {len(compared.differ)} of {total} shards differ from what {compared.worker} computed "
            f"then; the first is shard {shard} ({', '.join(names)})"
        )
    else:
        yield f"  contribution: {compared.equal} of {total} shards equal what {compared.worker} computed then"


def _version(result: Replayed) -> str:
    version = result.version
    if version.differ:
        return f"version {version.version}, after the step: {', '.join(version.differ[:_TENSORS])} differ"
    if version.equal:
        return f"version {version.version}, after the step: equal"
    return f"version {version.version}, after the step: the run has recorded nothing of it"


def _short(text: str) -> str:
    """Return a number in a few digits."""
    try:
        value = float(text)
    except ValueError:
        return text
    return f"{value:.6g}" if math.isfinite(value) else text
