"""``rallypoint plan``: what a job would cost on some machines, or an earlier run on others. `core.cost` computes it.

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

from rallypoint.coordinator.journal import kept_state
from rallypoint.core.cluster.terms import copies_of
from rallypoint.core.cost.candidates import Candidate, Encoding, Machines, as_paced, candidates_for
from rallypoint.core.cost.failures import NEVER
from rallypoint.core.cost.pipeline import step_cost
from rallypoint.core.cost.site import PACED, Servers, Site, Workers
from rallypoint.core.cost.verdict import Verdict, called, is_priced, verdict_of
from rallypoint.core.cost.workload import SENT_BYTES, Layer, Workload, layers_of, transformer
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Entry, Layout
from rallypoint.core.modes import Feature
from rallypoint.errors import ConfigError, RallypointError, UsageError, meant, to_install
from rallypoint.launch.plan import option, read_plan
from rallypoint.watch.follow import Follower, check_log
from rallypoint.watch.state import RunState

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {**_PREFIXES, "b": 1e9}
_BINARY = {prefix: 1024.0**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?)\s*([a-z/]*)", re.ASCII)


def count_of(text: str, what: str) -> float:
    """``7e9``, ``7B`` or ``350M``: a number. ConfigError if it is none; `what` says where it stands."""
    number, unit = _parts(text, what, "7e9, 7B or 350M")
    if unit not in _COUNTS:
        raise ConfigError(f"{what} {text}: write a number, as 7e9, 7B or 350M")
    return number * _COUNTS[unit]


def rate_of(text: str, what: str) -> float:
    """``25Gbit`` or ``3.1GB/s``: bytes a second. A small b alone (``25Gb/s``) is refused: people mean either by it."""
    number, unit = _parts(text, what, "25Gbit or 3GB/s")
    bits = re.fullmatch(r"([kmgt]?)(?:bit|bps|bit/s)", unit)
    whole = re.fullmatch(r"([kmgt]?)b/s", unit)  # B/s, in small letters
    found = bits or whole
    if found is None or ((whole or unit.endswith("bps")) and ("B" in text) is not bool(whole)):
        raise ConfigError(f"{what} {text}: write a rate of one direction, as 25Gbit or 3GB/s")
    return number * _PREFIXES[found[1]] / (8 if bits else 1)


def bytes_of(text: str, what: str) -> float:
    """``80GB``, ``512MB`` or ``80GiB``: bytes."""
    number, unit = _parts(text, what, "80GB")
    found = re.fullmatch(r"([kmgt])(i?)b", unit)
    if found is None:
        raise ConfigError(f"{what} {text}: write a size, as 80GB")
    return number * (_BINARY if found[2] else _PREFIXES)[found[1]]


def seconds_of(text: str, what: str) -> float:
    """``90d``, ``5000h``, ``10min``, ``30s``, or a number of seconds."""
    number, unit = _parts(text, what, "90d, 5000h, 10min or 30s")
    if unit not in _TIMES:
        raise ConfigError(f"{what} {text}: write a time, as 90d, 5000h, 10min or 30s")
    return number * _TIMES[unit]


def _parts(text: str, what: str, example: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text.strip().lower())
    if found is None or not 0 < float(found[1]) < math.inf:
        raise ConfigError(f"{what} {text}: write a number above 0 with its unit, as {example}")
    return float(found[1]), found[2]


_SPARSE_BYTES = 6.0  # of each word that top-k and DGC send


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run as the planner sees it.

    Attributes:
        name: of its folder.
        sizes: words of each module, in the order of the forward pass.
        workload: the run's settings; its layers compute nothing yet.
        replicas, workers, servers, replication: of the job, the members at the most.
        step: the median step, in seconds; 0 before there are enough.
        computed: seconds that the slowest replica of a step computed, the median; 0: not recorded.
        paced: the job sets `pace_mbit`.
        by_port: its members pace by what their ports carry (`pacing`); jobs of older versions did not.
        busiest: bytes a second that a machine has sent, or received, at the most; 0: unknown, or one machine only.
        losses: members that were lost, and `seconds_long` of what the run has lasted.
    """

    name: str
    sizes: tuple[int, ...]
    workload: Workload
    replicas: int
    workers: int
    servers: int
    replication: int
    step: float
    computed: float
    paced: bool
    by_port: bool
    busiest: float
    losses: int
    seconds_long: float

    @property
    def mtbf(self) -> float:
        """Seconds between two failures of one machine, counting each member as one."""
        return self.seconds_long * (self.workers + self.servers) / max(1, self.losses)


def measured_run(folder: Path) -> MeasuredRun:
    """Read the run in `folder`. UsageError if there is none, or nothing is known of its model yet."""
    check_log(folder)
    state = kept_state(folder)
    if state is None or state.record is None:
        raise UsageError(f"{folder} does not say what is trained: its job has not begun, or its journal is gone")
    follower = Follower(folder)
    follower.look()
    seen, record = follower.run, state.record
    counts = {kind: _most(seen, kind) for kind in ("computing", "server")}
    return MeasuredRun(
        name=folder.resolve().name, sizes=sizes_of(record.layout), workload=_workload_of(record),
        replicas=int(record.config.get("replicas", 1)), workers=counts["computing"] or 1,
        servers=counts["server"] or 1, replication=_replication_of(folder, record), step=seen.times.quantile(0.5),
        computed=statistics.median(seen.computed) if seen.computed else 0.0,
        paced=bool(record.config.get("pace_mbit")), by_port=record.config.get("pacing") == "auto",
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


def _workload_of(record: JobRecord) -> Workload:
    config = record.config
    return Workload(
        layers=(Layer(1),), shard_bytes=int(config.get("shard_bytes", 1 << 20)), up=_bytes_of(config.get("codec")),
        down=_bytes_of(config.get("down")), clip=config.get("clip") is not None or config.get("nonfinite") == "skip",
        steps=record.steps_per_round, early=bool(config.get("overlap", True)),
    )  # fmt: skip


def _bytes_of(codec: Any) -> float:
    """What a word takes with this codec, as the configuration has it; 4 for one that the planner does not know."""
    if not isinstance(codec, Mapping):
        return 4.0
    kind = str(codec.get("type", "raw"))
    if "ratio" in codec:
        return _SPARSE_BYTES * float(codec["ratio"])
    return SENT_BYTES.get(kind, 4.0)


def _replication_of(folder: Path, record: JobRecord) -> int:
    try:
        plan = read_plan(folder)
        return copies_of(plan.replication, plan.servers, supported=record.supports(Feature.REPLICATION))
    except RallypointError:
        return 1  # a run by hand


def _most(run: RunState, state: str) -> int:
    """How many members had this state at once, at the most."""
    changes = sorted(
        (t, new == state, member) for member, spans in run.members.spans.items() for t, new in spans
    )  # fmt: skip
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


_JOB, _MACHINES, _WORTH, _OUTPUT = "The job", "The machines", "Failures and money", "Output"
_MOST_WORDS, _MOST_DEPTH = 1e15, 10_000
_FLOPS = 6.0  # of a parameter and a token, forward and backward (Kaplan et al., 2020)
ENCODINGS: Mapping[str, Encoding] = {
    "fp16": Encoding("fp16", 2.0, 2.0, True),
    "bf16": Encoding("bf16", 2.0, 2.0, True),
    "int8": Encoding("int8 up, bf16 down", SENT_BYTES["int8"], 2.0, False),
    "int4": Encoding("int4 up, bf16 down", SENT_BYTES["int4"], 2.0, False),
    "dgc": Encoding("dgc 1 % up, bf16 down", 0.06, 2.0, False),
}
_LONG_S = 3600.0  # what a shorter run has lost may have been killed by hand


class CostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``rallypoint plan``."""

    model: Annotated[str, option(
        metavar="N", panel=_JOB, help="Its parameters, as 7e9, 7B or 350M: a transformer with as many blocks as usual.",
    )] = ""  # fmt: skip
    depth: Annotated[int, option(
        min=0, metavar="N", panel=_JOB, show_default=False, help="Its blocks, if their number is unusual.",
    )] = 0  # fmt: skip
    compute: Annotated[str, option(
        metavar="TIME", panel=_JOB, help="How long one GPU computes in a step, forward and backward, as 800ms or 2s;",
    )] = ""  # fmt: skip
    tokens: Annotated[str, option(
        metavar="N", panel=_JOB, help="... or the tokens of a step on each GPU, which are 6 operations a parameter,",
    )] = ""  # fmt: skip
    tflops: Annotated[float, option(
        min=0, metavar="N", panel=_JOB, show_default=False,
        help="... and the 10^12 operations a second that one GPU reaches in training.",
    )] = 0.0  # fmt: skip
    replicas: Annotated[int, option(
        min=0, metavar="N", panel=_JOB, show_default=False, help="Replicas of the job; by default as many as GPUs.",
    )] = 0  # fmt: skip
    codec: Annotated[list[str] | None, option(
        metavar="NAME", panel=_JOB,
        help=f"Look at this codec too: {', '.join(ENCODINGS)}; it changes the result. Can be repeated.",
    )] = None  # fmt: skip
    local_steps: Annotated[int, option(
        min=1, metavar="H", panel=_JOB, help="Synchronise every H steps (rp.LocalSteps), which changes the result.",
    )] = 1  # fmt: skip
    pace: Annotated[bool, option("--pace", metavar=None, panel=_JOB, help="The job sets pace_mbit.")] = False
    unpaced: Annotated[bool, option("--unpaced", metavar=None, panel=_JOB, help="The job sets pacing=off.")] = False
    clip: Annotated[bool, option("--clip", metavar=None, panel=_JOB, help="The job clips the gradient's norm.")] = False
    shard_kib: Annotated[int, option(min=1, metavar="KIB", panel=_JOB, help="The size of a shard.")] = 1024
    gpus: Annotated[int, option(
        min=0, metavar="N", panel=_MACHINES, show_default=False,
        help="Processes that compute, one for each GPU (or each CPU worker).",
    )] = 0  # fmt: skip
    gpus_per_host: Annotated[int, option(
        min=1, metavar="N", panel=_MACHINES, help="GPUs that share a host and its link.",
    )] = 1  # fmt: skip
    link: Annotated[str, option(
        metavar="RATE", panel=_MACHINES, help="The link of a host, in one direction, as 25Gbit or 3GB/s.",
    )] = ""  # fmt: skip
    server_link: Annotated[str, option(
        metavar="RATE", panel=_MACHINES, help="That of a server, if it is another.",
    )] = ""  # fmt: skip
    servers: Annotated[list[int] | None, option(
        "--servers", "-s", min=1, metavar="N", panel=_MACHINES,
        help="Look at so many servers; can be repeated. By default at numbers that suit the workers.",
    )] = None  # fmt: skip
    rack: Annotated[int, option(
        min=0, metavar="N", panel=_MACHINES, show_default=False, help="Hosts of a rack that share",
    )] = 0  # fmt: skip
    uplink: Annotated[str, option(metavar="RATE", panel=_MACHINES, help="... an uplink of this rate.")] = ""
    memory: Annotated[str, option(
        metavar="SIZE", panel=_MACHINES, help="Of a GPU, as 80GB: what does not fit is not recommended.",
    )] = ""  # fmt: skip
    mtbf: Annotated[str, option(
        metavar="TIME", panel=_WORTH, help="The mean time between failures of one machine, as 90d or 2000h.",
    )] = ""  # fmt: skip
    restart: Annotated[str, option(
        metavar="TIME", panel=_WORTH, help="Until a job without servers trains again after one.",
    )] = "120s"  # fmt: skip
    gpu_price: Annotated[float, option(
        min=0, metavar="PRICE", panel=_WORTH, show_default=False, help="Of an hour of one GPU, and",
    )] = 0.0  # fmt: skip
    server_price: Annotated[float, option(
        min=0, metavar="PRICE", panel=_WORTH, show_default=False, help="... of one server.",
    )] = 0.0  # fmt: skip
    rows: Annotated[int, option(
        min=1, metavar="N", panel=_OUTPUT, help="Rows of the table: the best so many, DDP and FSDP always.",
    )] = 12  # fmt: skip
    plot: Annotated[Path | None, option(
        metavar="FILE", panel=_OUTPUT, help="Draw the layouts' steps into this file, as .png or .svg.",
    )] = None  # fmt: skip
    json: Annotated[bool, option(
        "--json", metavar=None, panel=_OUTPUT, help="As JSON, on the standard output.",
    )] = False  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """What `core.cost` is asked: the job, the machines, other codecs, the replicas of each worker; notes for people."""

    workload: Workload
    machines: Machines
    encodings: tuple[Encoding, ...] = ()
    replicas: int = 1
    notes: list[str] = field(default_factory=list)


def question_of(options: CostOptions, run: MeasuredRun | None = None) -> Question:
    """The question that these options ask, about a model, or about a run (`run`), whose figures they may replace.

    UsageError says which option is missing; ConfigError which one is impossible.
    """
    notes: list[str] = []
    workload = _asked_workload(options) if run is None else _workload_of_run(options, run)
    gpus = options.gpus or (run.workers if run else 0)
    if not gpus:
        raise UsageError("how many GPUs? give --gpus N")
    replicas = options.replicas or (run.replicas if run else gpus)
    if replicas < gpus:
        raise UsageError(f"{gpus} GPUs and {replicas} replicas: those above it would stand by. Use --gpus {replicas}")
    if gpus % options.gpus_per_host:
        raise UsageError(f"{gpus} GPUs on hosts of {options.gpus_per_host}: give a whole number of hosts")
    if bool(options.rack) != bool(options.uplink):
        raise UsageError("--rack N and --uplink RATE belong together: N hosts share an uplink of that rate")
    if options.server_price and not options.gpu_price:
        raise UsageError("--server-price belongs to --gpu-price: give what an hour of a GPU costs too")
    machines = Machines(
        gpus=gpus, per_host=options.gpus_per_host, rate=_link_of(options, run, notes),
        server_rate=rate_of(options.server_link, "--server-link") if options.server_link else 0.0,
        servers=tuple(sorted(set(options.servers or ()))), rack=options.rack,
        uplink=rate_of(options.uplink, "--uplink") if options.uplink else 0.0,
        memory=bytes_of(options.memory, "--memory") if options.memory else 0.0,
        restart=seconds_of(options.restart, "--restart"), gpu_price=options.gpu_price,
        server_price=options.server_price,
        paced=options.pace or (run is not None and run.paced), mtbf=_mtbf_of(options, run, notes),
        by_port=not options.unpaced and (run is None or run.by_port),
    )  # fmt: skip
    return Question(workload, machines, _encodings_of(options), -(-replicas // gpus), notes)


def _asked_workload(options: CostOptions) -> Workload:
    if not options.model:
        raise UsageError("what is to be trained? give --model N (its parameters, as 7e9), or the folder of a run")
    words = count_of(options.model, "--model")
    if not 1000 <= words <= _MOST_WORDS or options.depth > min(_MOST_DEPTH, words / 3):
        depth = f" of {options.depth:,} blocks" if options.depth else ""
        raise ConfigError(f"--model {options.model}{depth}: that is no model; write its parameters, as 350M")
    return _told(options, transformer(words, _compute_of(options, words), depth=options.depth))


def _compute_of(options: CostOptions, words: float) -> float:
    if options.compute:
        return seconds_of(options.compute, "--compute")
    if not (options.tokens and options.tflops):
        raise UsageError("how long does a GPU compute? give --compute TIME, or --tokens N and --tflops N")
    return _FLOPS * words * count_of(options.tokens, "--tokens") / (options.tflops * 1e12)


def _told(options: CostOptions, layers: Any) -> Workload:
    return Workload(
        layers=layers, shard_bytes=options.shard_kib << 10, clip=options.clip, steps=options.local_steps
    )  # fmt: skip


def _workload_of_run(options: CostOptions, run: MeasuredRun) -> Workload:
    if options.model or options.depth:
        raise UsageError("--model and --depth are the run's own: leave them out, or the run")
    seconds = seconds_of(options.compute, "--compute") if options.compute else run.computed
    if not seconds:
        raise UsageError(f"{run.name} has not recorded how long its replicas computed: give --compute TIME")
    workload = msgspec.structs.replace(run.workload, layers=layers_of(run.sizes, seconds))
    if options.local_steps > 1:
        workload = msgspec.structs.replace(workload, steps=options.local_steps)
    if options.shard_kib != CostOptions.shard_kib:
        workload = msgspec.structs.replace(workload, shard_bytes=options.shard_kib << 10)
    return workload


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


def _encodings_of(options: CostOptions) -> tuple[Encoding, ...]:
    names = [name for name in dict.fromkeys(options.codec or ()) if name != "raw"]
    for name in names:
        if name not in ENCODINGS:
            raise ConfigError(f"--codec {name}{meant(name, ENCODINGS)}: the planner knows {', '.join(ENCODINGS)}")
    return tuple(ENCODINGS[name] for name in names)


_KINDS = (".png", ".svg", ".pdf")
_COMPUTING, _WAITING = "#4c78a8", "#f2a45c"
_LAYOUT_WIDTH = 22
ASSUMED = (
    "assumed: fp32 gradients and parameters with AdamW, links that nobody else uses, a core for each server, a standby "
    "for each machine that fails"
)

_AGGREGATORS = (
    "an aggregator of a rack has the link of its hosts together, or is several, each with some of the hosts: on a link "
    "as one of theirs it would be what the rack waits for"
)


def told(question: Question, candidates: Sequence[Candidate], verdict: Verdict, rows: int) -> RenderableType:
    """What is printed."""
    failing, priced = question.machines.mtbf < NEVER, is_priced(candidates)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, highlight=False)
    table.add_column("layout", min_width=_LAYOUT_WIDTH)
    for name in (
        "s/step", "waits", *(["goodput"] if failing else []), "GB", *(["1000 steps"] if priced else []),
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for one in shown(candidates, verdict, rows):
        memory = one.memory
        table.add_row(
            called(one), f"{one.step.seconds:.3g}", f"{one.step.waited / one.step.seconds:.0%}",
            *([f"{one.goodput:.1%}"] if failing else []),
            f"{'' if one.fits else '! '}{_gb(memory.device)}/{_gb(memory.host)}/{_gb(memory.server)}",
            *([f"{one.price:,.2f}"] if priced else []), style="bold" if one is verdict.best else "",
        )  # fmt: skip
    notes = ["GB: of a GPU, of its host for it, of a server; waits: the part of a step in which a GPU computes nothing"]
    notes += question.notes
    if any("aggregator a rack" in one.name for one in candidates):
        notes.append(_AGGREGATORS)
    if not all(one.fits for one in candidates):
        notes.append("! does not fit into a GPU's memory")
    lines = [Text(f"{_sentence(note)}", style="dim") for note in (*notes, ASSUMED)]
    return Group(Text(_title(question)), table, *lines, Text(f"\n{_sentence(verdict.why)}", style="bold"))


def shown(candidates: Sequence[Candidate], verdict: Verdict, rows: int) -> list[Candidate]:
    """The rows of the table, the quickest first: DDP and FSDP always, of the others the best so many."""
    ranked = sorted(candidates, key=lambda one: (one.seconds, one.servers))
    kept = ranked[:rows]
    return [one for one in ranked if one in kept or not one.ours or one is verdict.best]


def compared(run: MeasuredRun, seconds: float) -> str:
    """A note on how the model's figure for the run's own layout compares with the measured one."""
    if not run.step:
        return f"the run {run.name} has done too few steps to compare with"
    links = "on such links the model says" if run.busiest else "on one machine; on such links the model says"
    return (
        f"in {run.name} with {run.workers} workers and {run.servers} servers a step took {run.step:.3g} s, of which a "
        f"replica computed {run.computed:.3g}, {links} {seconds:.3g} ({seconds / run.step - 1:+.0%})"
    )


def as_json(question: Question, candidates: Sequence[Candidate], verdict: Verdict) -> bytes:
    """All candidates, the verdict and the notes; a time that is infinite is null."""
    told: dict[str, Any] = {
        "recommendation": _sentence(verdict.why), "servers": verdict.ours, "notes": question.notes,
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
    hosts = "" if machines.per_host == 1 else " on 1 host" if machines.hosts == 1 else f" on {machines.hosts} hosts"
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


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g}" if 0 < nbytes < 1e9 else f"{nbytes / 1e9:.3g}" if nbytes else "-"


def check_chart(path: Path) -> None:
    """UsageError if matplotlib is not installed, `path` has no ending that it knows, or its folder does not exist."""
    if path.suffix not in _KINDS:
        raise UsageError(f"--plot {path}: name a file that ends with {', '.join(_KINDS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}; make it first")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError(f"--plot needs matplotlib: {to_install('plots')}") from None


def draw(candidates: Sequence[Candidate], title: str, path: Path) -> None:
    """Draw a bar for each candidate, the first one at the top: computing, and waiting. UsageError if it cannot be
    written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.32 * len(candidates)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [called(one) for one in candidates]
    places = list(range(len(candidates)))
    busy = [one.step.seconds - one.step.waited for one in candidates]
    axes.barh(places, busy, color=_COMPUTING, label="computing")
    axes.barh(places, [one.step.waited for one in candidates], left=busy, color=_WAITING, label="waiting")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step, when nothing fails")
    axes.set_title(title, fontsize="medium")
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


_LEAST_SHARD, _WORTH_SAYING = 16 << 10, 1.05  # smaller ones cost more time than they save; less is not worth a note


def answer(options: CostOptions, folder: Path | None, console: Console) -> None:
    """Print what a job would cost, and which layout to use. Errors are those of `question_of` and `measured_run`."""
    if options.plot is not None:
        check_chart(options.plot)
    run = None if folder is None else measured_run(folder)
    question = question_of(options, run)
    if run is not None and not options.gpus:
        question.notes.append(compared(run, _own_seconds(question, run)))
    candidates = candidates_for(question.workload, question.machines, question.encodings, question.replicas)
    verdict = verdict_of(candidates)
    question.notes.extend(_quicker(question, verdict))
    if options.json:
        sys.stdout.write(as_json(question, candidates, verdict).decode() + "\n")
    else:
        console.print(told(question, candidates, verdict, options.rows))
    if options.plot is not None:
        draw(shown(candidates, verdict, options.rows), verdict.why.partition(":")[0], options.plot)


def _quicker(question: Question, verdict: Verdict) -> list[str]:
    """A note for each setting that would make the best layout with servers quicker: shards of a quarter of the size
    (the last one comes down alone), and pacing."""
    ours = verdict.best if verdict.ours else verdict.other
    if ours is None:
        return []
    workload, machines = question.workload, question.machines
    size, pace = workload.shard_bytes // 4, round(PACED * machines.rate * 8 / 1e6)
    tried = [
        (f"shards of {size >> 10} KiB (shard_bytes, --shard-kib)", size >= _LEAST_SHARD,
         msgspec.structs.replace(workload, shard_bytes=size), machines),
        (f"pace_mbit={pace} (--pace)", not machines.paced, workload, msgspec.structs.replace(machines, paced=True)),
    ]  # fmt: skip
    notes = []
    for words, possible, other, there in tried:
        there = msgspec.structs.replace(there, servers=(ours.servers,))
        again = candidates_for(other, there, question.encodings, question.replicas)
        same = [one for one in again if _key(one) == _key(ours)]
        if possible and same and same[0].step.seconds * _WORTH_SAYING < ours.step.seconds:
            seconds = f"{same[0].step.seconds:.3g} s instead of {ours.step.seconds:.3g}"
            notes.append(f"with {words} {called(ours)} would take {seconds}")
    return notes


def _key(one: Candidate) -> tuple[str, int, str]:
    return one.name, one.replication, one.codec


def _own_seconds(question: Question, run: MeasuredRun) -> float:
    """What the model says of the run's own layout."""
    machines = question.machines
    workers = Workers(run.workers, machines.rate, replicas=question.replicas)
    site = Site(
        workers=(workers,), servers=(Servers(run.servers, machines.server_rate or machines.rate),),
        replication=min(run.replication, run.servers), speeds=machines.speeds,
    )  # fmt: skip
    return step_cost(question.workload, as_paced(site, question.workload, machines)).seconds
