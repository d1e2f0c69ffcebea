"""``rallypoint plan``: what a job would cost on some machines, or an earlier run on others. `core.plan` computes it.

`question_of` makes a workload and machines of the options, `answer` asks the cost model, `shown` and `as_json` say it.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rallypoint.codec.spec import CodecSpec
from rallypoint.config import JobConfig
from rallypoint.config.keys import check_settings
from rallypoint.config.resolve import merged, overrides_from, parse, resolve
from rallypoint.coordinator.journal import kept_state
from rallypoint.core.cluster.terms import copies_of
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Entry, Layout
from rallypoint.core.modes import Feature
from rallypoint.core.plan.candidates import (
    Candidate,
    Judgement,
    Machines,
    PlannedCodec,
    as_paced,
    called,
    candidates_for,
)
from rallypoint.core.plan.failures import NEVER
from rallypoint.core.plan.pipeline import step_cost
from rallypoint.core.plan.site import PACED
from rallypoint.core.plan.workload import SENT_BYTES, Layer, Workload, layers_of, transformer
from rallypoint.core.typed import counted
from rallypoint.errors import ConfigError, RallypointError, UsageError, meant
from rallypoint.launch.plan import option, read_plan
from rallypoint.watch.follow import Follower
from rallypoint.watch.state import RunState

_JOB, _MACHINES, _OUTPUT = "The job", "The machines", "Output"
_MOST_WORDS = 1e15
_GPUS = re.compile(r"(?:([1-9][0-9]{0,5})x)?([1-9][0-9]{0,6})", re.ASCII)

_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {"": 1.0, **_PREFIXES, "b": 1e9}
_SIZES = {f"{p}b": by for p, by in _PREFIXES.items()} | {f"{p}ib": 1024.0**n for n, p in enumerate(_PREFIXES, 1)}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?)\s*([a-z/]*)", re.ASCII)


def count_of(text: str, what: str) -> float:
    """``7e9``, ``7B`` or ``350M``: a number. ConfigError if it is none; `what` says where it stands."""
    return _number(text, what, _COUNTS, "7e9, 7B or 350M")


def rate_of(text: str, what: str) -> float:
    """``25Gbit`` or ``3.1GB/s``: bytes a second. A small b alone (``25Gb/s``) is refused: people mean either by it."""
    prefixes = {"": 1.0, **_PREFIXES}
    units = {f"{p}{unit}": by / 8 for p, by in prefixes.items() for unit in ("bit", "bps", "bit/s")}
    units |= {f"{p}b/s": by for p, by in prefixes.items()}
    low, large = text.lower().rstrip(), "B" in text
    if (low.endswith("b/s") and not large) or (low.endswith("bps") and large):
        raise ConfigError(f"{what} {text}: write a rate of one direction, as 25Gbit or 3GB/s")
    return _number(text, what, units, "25Gbit or 3GB/s")


def bytes_of(text: str, what: str) -> float:
    """``80GB``, ``512MB`` or ``80GiB``: bytes."""
    return _number(text, what, _SIZES, "80GB")


def seconds_of(text: str, what: str) -> float:
    """``90d``, ``5000h``, ``10min``, ``30s``, or a number of seconds."""
    return _number(text, what, _TIMES, "90d, 5000h, 10min or 30s")


def _number(text: str, what: str, units: Mapping[str, float], example: str) -> float:
    found = _NUMBER.fullmatch(text.strip().lower())
    if found is None or not 0 < float(found[1]) < math.inf or found[2] not in units:
        raise ConfigError(f"{what} {text}: write a number above 0 with its unit, as {example}")
    return float(found[1]) * units[found[2]]


_SPARSE_BYTES = 6.0  # of each word that top-k and DGC send


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run as the planner sees it."""

    name: str  # of its folder
    sizes: tuple[int, ...]  # words of each module, in the order of the forward pass
    config: Mapping[str, Any]  # the job's settings, as data
    # `workers`, `servers`, `replication`: of the job, the members at the most
    workers: int
    servers: int
    replication: int
    step: float  # the median step, in seconds; 0 before there are enough
    computed: float  # seconds that the slowest replica of a step computed, the median; 0: not recorded
    busiest: float  # bytes a second that a machine has sent, or received, at the most; 0: unknown, or one machine only
    losses: int  # members that were lost, and `seconds_long` of what the run has lasted
    seconds_long: float

    @property
    def mtbf(self) -> float:
        """Seconds between two failures of one machine, counting each member as one."""
        return self.seconds_long * (self.workers + self.servers) / max(1, self.losses)


def measured_run(folder: Path) -> MeasuredRun:
    """Read the run in `folder`. UsageError if there is none, or nothing is known of its model yet."""
    follower = Follower(folder)
    state = kept_state(folder)
    if state is None or state.record is None:
        raise UsageError(f"{folder} does not say what is trained: its job has not begun, or its journal is gone")
    follower.look()
    seen, record = follower.run, state.record
    counts = {kind: _most(seen, kind) for kind in ("computing", "server")}
    return MeasuredRun(
        name=folder.resolve().name, sizes=sizes_of(record.layout), config=record.config,
        workers=counts["computing"] or 1, servers=counts["server"] or 1, replication=_replication_of(folder, record),
        step=seen.times.quantile(0.5), computed=statistics.median(seen.computed) if seen.computed else 0.0,
        busiest=_busiest(seen),
        losses=sum(mark["kind"] == "loss" for mark in seen.marks), seconds_long=seen.now,
    )  # fmt: skip


def sizes_of(layout: Layout) -> tuple[int, ...]:
    """The words of each module that has parameters of its own, about in the order of the forward pass.

    Each optimizer group lies in backward order (`core.layout`), so a module stands where its largest tensor is, in
    parts of that group. What only servers hold (tables) is left out: it is pulled row by row.
    """
    held = [entry for entry in layout.entries if entry.spec.group >= 0 and entry.spec.numel]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    modules: dict[str, list[Entry]] = {}
    for entry in held:
        group = entry.spec.group
        first[group] = min(first.get(group, entry.start), entry.start)
        last[group] = max(last.get(group, 0), entry.stop)
        modules.setdefault(entry.spec.name.rpartition(".")[0], []).append(entry)

    def depth(own: list[Entry]) -> float:
        largest = max(own, key=lambda entry: entry.spec.numel)
        group = largest.spec.group
        return (last[group] - largest.stop) / (last[group] - first[group])

    return tuple(sum(entry.spec.numel for entry in own) for own in sorted(modules.values(), key=depth))


def workload_of(config: JobConfig, layers: Sequence[Layer]) -> Workload:
    """What a job with these settings does in a step."""
    return Workload(
        layers=tuple(layers), shard_bytes=config.network.shard_bytes, up=_bytes_of(config.codec),
        down=_bytes_of(config.down),
        clip=config.clip is not None or config.nonfinite == "skip", steps=config.steps_per_round,
        early=config.network.overlap,
    )  # fmt: skip


def _bytes_of(codec: CodecSpec) -> float:
    """What a word takes with this codec; 4 for one that the planner does not know."""
    told = msgspec.to_builtins(codec)
    return _SPARSE_BYTES * told["ratio"] if "ratio" in told else SENT_BYTES.get(told["type"], 4.0)


def _replication_of(folder: Path, record: JobRecord) -> int:
    try:
        plan = read_plan(folder)
        return copies_of(plan.replication, plan.servers, supported=record.supports(Feature.REPLICATION))
    except RallypointError:
        return 1  # a run by hand


def _most(run: RunState, state: str) -> int:
    """How many members had this state at once, at the most."""
    changes = sorted((t, new == state, member) for member, spans in run.members.spans.items() for t, new in spans)
    here: set[str] = set()
    most = 0
    for _, comes, member in changes:
        here = here | {member} if comes else here - {member}
        most = max(most, len(here))
    return most


def _busiest(run: RunState) -> float:
    """Between machines; on one machine nothing is measured, because loopback is not a link."""
    samples = [host.sample for host in run.machines.hosts.values()]
    if len(samples) < 2:
        return 0.0
    return max(max(sample.network_sent, sample.network_received) for sample in samples)


ENCODINGS: Mapping[str, PlannedCodec] = {
    "fp16": PlannedCodec("fp16", 2.0, 2.0, True),
    "bf16": PlannedCodec("bf16", 2.0, 2.0, True),
    "int8": PlannedCodec("int8 up, bf16 down", SENT_BYTES["int8"], 2.0, False),
    "int4": PlannedCodec("int4 up, bf16 down", SENT_BYTES["int4"], 2.0, False),
    "dgc": PlannedCodec("dgc 1 % up, bf16 down", 0.06, 2.0, False),
}
_LONG_S = 3600.0  # what a shorter run has lost may have been killed by hand


class CostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``rallypoint plan``."""

    model: Annotated[str, option(
        metavar="N", panel=_JOB, help="Its parameters, as 7e9, 7B or 350M: a transformer of the usual shape.",
    )] = ""  # fmt: skip
    compute: Annotated[str, option(
        metavar="TIME", panel=_JOB,
        help="How long one GPU computes in a step, forward and backward, as 800ms or 2s: 6 operations for each "
        "parameter and token.",
    )] = ""  # fmt: skip
    codec: Annotated[list[str] | None, option(
        metavar="NAME", panel=_JOB,
        help=f"Look at this codec too: {', '.join(ENCODINGS)}; it changes the result. May be repeated.",
    )] = None  # fmt: skip
    sets: Annotated[list[str] | None, option(
        "--set", metavar="KEY=VALUE", panel=_JOB,
        help="A setting of the job, as clip=1.0 or network.shard_bytes=262144; may be repeated.",
    )] = None  # fmt: skip
    gpus: Annotated[str, option(
        metavar="N|HxN", panel=_MACHINES,
        help="Hosts, and GPUs (or CPU workers) on each: 4 is 4 hosts with one each, 4x8 is 4 hosts with 8 each, which "
        "share the host's link, 1x8 is one host with 8.",
    )] = ""  # fmt: skip
    link: Annotated[str, option(
        metavar="RATE", panel=_MACHINES, help="The link of a host, in one direction, as 25Gbit or 3GB/s.",
    )] = ""  # fmt: skip
    servers: Annotated[list[int] | None, option(
        "--servers", "-s", min=1, metavar="N", panel=_MACHINES,
        help="Look at this number of servers; may be repeated. By default at numbers that suit the workers.",
    )] = None  # fmt: skip
    memory: Annotated[str, option(
        metavar="SIZE", panel=_MACHINES, help="Of a GPU, as 80GB: what does not fit is not recommended.",
    )] = ""  # fmt: skip
    mtbf: Annotated[str, option(
        metavar="TIME", panel=_MACHINES, help="The mean time between failures of one machine, as 90d or 2000h.",
    )] = ""  # fmt: skip
    json: Annotated[bool, option(
        "--json", metavar=None, panel=_OUTPUT, help="As JSON, on the standard output.",
    )] = False  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """What `core.plan` is asked: the job, the machines, other codecs, the replicas of each worker; notes for people."""

    workload: Workload
    machines: Machines
    encodings: tuple[PlannedCodec, ...] = ()
    replicas: int = 1
    notes: list[str] = field(default_factory=list)


def question_of(options: CostOptions, run: MeasuredRun | None = None) -> Question:
    """The question that these options ask, about a model, or about a run (`run`), whose figures they may replace.

    UsageError says which option is missing; ConfigError which one is impossible.
    """
    notes: list[str] = []
    overrides = overrides_from(None, options.sets or [])
    check_settings(overrides)
    config = parse(merged(run.config, overrides)) if run else resolve({}, overrides)
    layers = _layers_of(options) if run is None else _layers_of_run(options, run)
    hosts, per_host = _gpus_of(options, run)
    gpus = hosts * per_host
    replicas = config.replicas if run or "replicas" in overrides else gpus
    if replicas < gpus:
        raise UsageError(f"{gpus} GPUs and {replicas} replicas: those above it would stand by. Use --gpus {replicas}")
    machines = Machines(
        gpus=gpus, per_host=per_host, rate=_link_of(options, run, notes),
        servers=tuple(sorted(set(options.servers or ()))),
        memory=bytes_of(options.memory, "--memory") if options.memory else 0.0,
        paced=bool(config.network.pace_mbit), mtbf=_mtbf_of(options, run, notes),
        by_port=config.network.pacing == "auto",
    )  # fmt: skip
    return Question(workload_of(config, layers), machines, _encodings_of(options), -(-replicas // gpus), notes)


def _gpus_of(options: CostOptions, run: MeasuredRun | None) -> tuple[int, int]:
    """How many hosts, and how many GPUs on each."""
    if not options.gpus:
        if run is None:
            raise UsageError("how many GPUs? give --gpus 4 for 4 hosts with one each, or 4x8 for 8 on each of them")
        return run.workers, 1
    if (found := _GPUS.fullmatch(options.gpus)) is None:
        raise ConfigError(f"--gpus {options.gpus}: write their number, as 8, or 4x8 for 8 on each of 4 hosts")
    return (int(found[1]), int(found[2])) if found[1] else (int(found[2]), 1)


def _layers_of(options: CostOptions) -> tuple[Layer, ...]:
    if not options.model:
        raise UsageError("what is to be trained? give --model N (its parameters, as 7e9), or the folder of a run")
    words = count_of(options.model, "--model")
    if not 1000 <= words <= _MOST_WORDS:
        raise ConfigError(f"--model {options.model}: that is no model; write its parameters, as 350M")
    if not options.compute:
        raise UsageError("how long does a GPU compute in a step? give --compute TIME, as 800ms")
    return transformer(words, seconds_of(options.compute, "--compute"))


def _layers_of_run(options: CostOptions, run: MeasuredRun) -> tuple[Layer, ...]:
    if options.model:
        raise UsageError("--model is the run's own: leave it out, or the run")
    seconds = seconds_of(options.compute, "--compute") if options.compute else run.computed
    if not seconds:
        raise UsageError(f"{run.name} has not recorded how long its replicas computed: give --compute TIME")
    return layers_of(run.sizes, seconds)


def _link_of(options: CostOptions, run: MeasuredRun | None, notes: list[str]) -> float:
    if options.link:
        return rate_of(options.link, "--link")
    if run is None:
        raise UsageError("how fast are the links? give --link RATE, as 25Gbit")
    if not run.busiest:
        raise UsageError(
            f"how fast are the links? {run.name} does not say (its machines had no rallypoint[watch], or it ran on one "
            "machine): give --link RATE, as 25Gbit"
        )
    notes.append(
        f"the link is taken for {run.busiest * 8 / 1e9:.3g} Gbit/s, the most that a machine of the run has sent: it "
        "may be faster (--link)"
    )
    return run.busiest


def _mtbf_of(options: CostOptions, run: MeasuredRun | None, notes: list[str]) -> float:
    if options.mtbf:
        return seconds_of(options.mtbf, "--mtbf")
    if run is None or not run.losses:
        return NEVER
    if run.seconds_long < _LONG_S:
        notes.append(
            f"members that the run lost: {run.losses}; {run.seconds_long:,.0f} s are too short to say how often "
            "machines fail, so here they do not (--mtbf)"
        )
        return NEVER
    notes.append(
        f"in {run.seconds_long:,.0f} s of the run the number of lost members was {run.losses}: a machine fails every "
        f"{run.mtbf / 3600:,.2g} h (--mtbf)"
    )
    return run.mtbf


def _encodings_of(options: CostOptions) -> tuple[PlannedCodec, ...]:
    names = [name for name in dict.fromkeys(options.codec or ()) if name != "raw"]
    for name in names:
        if name not in ENCODINGS:
            raise ConfigError(f"--codec {name}{meant(name, ENCODINGS)}: the planner knows {', '.join(ENCODINGS)}")
    return tuple(ENCODINGS[name] for name in names)


_LAYOUT_WIDTH, _ROWS = 22, 12
ASSUMED = (
    "assumed: fp32 gradients and parameters with AdamW, links that nobody else uses, a core for each server, a standby "
    "for each machine that fails"
)


def told(question: Question, candidates: Sequence[Candidate], verdict: Judgement) -> RenderableType:
    failing = question.machines.mtbf < NEVER
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, highlight=False)
    table.add_column("layout", min_width=_LAYOUT_WIDTH)
    for name in ("s/step", "waits", *(["goodput"] if failing else []), "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in shown(candidates, verdict):
        memory = one.memory
        table.add_row(
            called(one), f"{one.step.seconds:.3g}", f"{one.step.waited / one.step.seconds:.0%}",
            *([f"{one.goodput:.1%}"] if failing else []),
            f"{'' if one.fits else '! '}{_gb(memory.device)}/{_gb(memory.host)}/{_gb(memory.server)}",
            style="bold" if one is verdict.best else "",
        )  # fmt: skip
    notes = ["GB: of a GPU, of its host for it, of a server; waits: the part of a step in which a GPU computes nothing"]
    notes += question.notes
    if not all(one.fits for one in candidates):
        notes.append("! does not fit into a GPU's memory")
    lines = [Text(f"{_sentence(note)}", style="dim") for note in (*notes, ASSUMED)]
    return Group(Text(_title(question)), table, *lines, Text(f"\n{_recommended(verdict)}", style="bold"))


def shown(candidates: Sequence[Candidate], verdict: Judgement) -> list[Candidate]:
    """The rows of the table, the quickest first: DDP and FSDP always, and what is recommended."""
    ranked = sorted(candidates, key=lambda one: (one.seconds, one.servers))
    kept = ranked[:_ROWS]
    return [one for one in ranked if one in kept or not one.ours or one is verdict.best]


def compared(run: MeasuredRun, seconds: float) -> str:
    """A note on how the model's figure for the run's own layout compares with the measured one."""
    if not run.step:
        return f"the run {run.name} has done too few steps to compare with"
    links = "on such links the model says" if run.busiest else "on one machine; on such links the model says"
    return (
        f"in {run.name} with {counted(run.workers, 'worker')} and {counted(run.servers, 'server')} a step took "
        f"{run.step:.3g} s, of which a replica computed {run.computed:.3g}, {links} {seconds:.3g} "
        f"({seconds / run.step - 1:+.0%})"
    )


def as_json(question: Question, candidates: Sequence[Candidate], verdict: Judgement) -> bytes:
    """All candidates, the verdict and the notes; a time that is infinite is null."""
    told: dict[str, Any] = {
        "recommendation": _recommended(verdict), "servers": verdict.ours, "notes": question.notes,
        "best": _fields(verdict.best), "other": None if verdict.other is None else _fields(verdict.other),
        "layouts": [_fields(one) for one in candidates],
    }  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(told), indent=2)


def _fields(one: Candidate) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(one)
    seconds = None if math.isinf(one.seconds) else one.seconds
    return {**fields, "period": None if one.period == NEVER else one.period, "seconds": seconds}


def _title(question: Question) -> str:
    work, machines = question.workload, question.machines
    gpus = "1 GPU" if machines.gpus == 1 else f"{machines.gpus} GPUs"
    hosts = " on 1 host" if machines.hosts == 1 else f" on {machines.hosts} hosts"
    each = "" if question.replicas == 1 else f", {question.replicas} replicas each"
    rounds = "" if work.steps == 1 else f", synchronised every {work.steps} steps"
    return (
        f"{_short(work.words).replace('G', 'B')} parameters (K = {_short(work.nbytes)}B), {gpus}{hosts}{each}, "
        f"computing {work.compute * question.replicas:.3g} s a step{rounds}; "
        f"{_short(machines.rate * 8)}bit/s: K/B = {work.nbytes / machines.rate:.3g} s"
    )


def _short(number: float) -> str:
    """``7 G`` for 7e9, as units follow it."""
    for unit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g} {prefix}"
    return f"{number:.3g} "


def _recommended(verdict: Judgement) -> str:
    """The layout, and the mode to use with servers."""
    return " ".join(_sentence(text) for text in (verdict.why, verdict.advice) if text)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g}" if 0 < nbytes < 1e9 else f"{nbytes / 1e9:.3g}" if nbytes else "-"


_LEAST_SHARD, _WORTH = 16 << 10, 1.05  # smaller ones cost more time than they save; less is not worth a note


def answer(options: CostOptions, folder: Path | None, console: Console) -> None:
    """Print what a job would cost, and which layout to use. Errors are those of `question_of` and `measured_run`."""
    run = None if folder is None else measured_run(folder)
    question = question_of(options, run)
    if run is not None and not options.gpus:
        question.notes.append(compared(run, _own_seconds(question, run)))
    candidates = candidates_for(question.workload, question.machines, question.encodings, question.replicas)
    verdict = Judgement.of(candidates)
    question.notes.extend(_quicker(question, verdict))
    if options.json:
        sys.stdout.write(as_json(question, candidates, verdict).decode() + "\n")
    else:
        console.print(told(question, candidates, verdict))


def _quicker(question: Question, verdict: Judgement) -> list[str]:
    """A note for each setting that would make the best layout with servers quicker: shards of a quarter of the size
    (the last one comes down alone), and pacing."""
    ours = verdict.best if verdict.ours else verdict.other
    if ours is None:
        return []
    workload, machines = question.workload, question.machines
    size, pace = workload.shard_bytes // 4, round(PACED * machines.rate * 8 / 1e6)
    tried = [
        (f"shards of {size >> 10} KiB (network.shard_bytes={size})", size >= _LEAST_SHARD,
         msgspec.structs.replace(workload, shard_bytes=size), machines),
        (f"network.pace_mbit={pace}", not machines.paced, workload, msgspec.structs.replace(machines, paced=True)),
    ]  # fmt: skip
    notes = []
    for words, possible, other, there in tried:
        there = msgspec.structs.replace(there, servers=(ours.servers,))
        again = candidates_for(other, there, question.encodings, question.replicas)
        same = [one for one in again if _key(one) == _key(ours)]
        if possible and same and same[0].step.seconds * _WORTH < ours.step.seconds:
            seconds = f"{same[0].step.seconds:.3g} s instead of {ours.step.seconds:.3g}"
            notes.append(f"with {words} {called(ours)} would take {seconds}")
    return notes


def _key(one: Candidate) -> tuple[str, int, str]:
    return one.name, one.replication, one.codec


def _own_seconds(question: Question, run: MeasuredRun) -> float:
    """What the model says of the run's own layout."""
    machines = msgspec.structs.replace(question.machines, gpus=run.workers, per_host=1)
    workers = machines.workers(replicas=question.replicas)
    site = machines.site(run.servers, workers, replication=min(run.replication, run.servers))
    return step_cost(question.workload, as_paced(site, question.workload, machines)).seconds
