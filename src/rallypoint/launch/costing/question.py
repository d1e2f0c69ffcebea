"""What is asked of the planner: the options of ``rallypoint plan``, as a workload and machines of the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rallypoint.core.plan.candidates import Encoding, Machines
from rallypoint.core.plan.failures import NEVER
from rallypoint.core.plan.workload import SENT_BYTES, Workload, layers_of, transformer
from rallypoint.errors import ConfigError, UsageError, meant
from rallypoint.launch.cluster import option
from rallypoint.launch.costing.measured import MeasuredRun
from rallypoint.launch.costing.quantities import bytes_of, count_of, rate_of, seconds_of

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
    """What `core.plan` is asked: the job, the machines, other codecs, the replicas of each worker; notes for people."""

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
    workload = _workload_of(options) if run is None else _workload_of_run(options, run)
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


def _workload_of(options: CostOptions) -> Workload:
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
