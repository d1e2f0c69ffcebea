"""What is asked of the planner: the options of ``rallypoint plan``, as a workload and machines of the cost model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from rallypoint.config.keys import check_keys
from rallypoint.config.resolve import merged, overrides_from, parse, resolve
from rallypoint.config.values import check_values
from rallypoint.core.plan.candidates import Encoding, Machines
from rallypoint.core.plan.failures import NEVER
from rallypoint.core.plan.workload import SENT_BYTES, Layer, Workload, layers_of, transformer
from rallypoint.errors import ConfigError, UsageError, meant
from rallypoint.launch.cluster import option
from rallypoint.launch.costing.measured import MeasuredRun, workload_of
from rallypoint.launch.costing.quantities import bytes_of, count_of, rate_of, seconds_of

_JOB, _MACHINES, _OUTPUT = "The job", "The machines", "Output"
_MOST_WORDS = 1e15
_GPUS = re.compile(r"(?:([1-9][0-9]{0,5})x)?([1-9][0-9]{0,6})", re.ASCII)
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
        help="A setting of the job, as clip=1.0, shard_bytes=262144 or replicas=64; may be repeated.",
    )] = None  # fmt: skip
    gpus: Annotated[str, option(
        metavar="N|HxN", panel=_MACHINES,
        help="Processes that compute, one for each GPU (or each CPU worker): 8, or 4x8 for 8 on each of 4 hosts, which "
        "share the host's link.",
    )] = ""  # fmt: skip
    link: Annotated[str, option(
        metavar="RATE", panel=_MACHINES, help="The link of a host, in one direction, as 25Gbit or 3GB/s.",
    )] = ""  # fmt: skip
    servers: Annotated[list[int] | None, option(
        "--servers", "-s", min=1, metavar="N", panel=_MACHINES,
        help="Look at so many servers; may be repeated. By default at numbers that suit the workers.",
    )] = None  # fmt: skip
    memory: Annotated[str, option(
        metavar="SIZE", panel=_MACHINES, help="Of a GPU, as 80GB: what does not fit is not recommended.",
    )] = ""  # fmt: skip
    mtbf: Annotated[str, option(
        metavar="TIME", panel=_MACHINES, help="The mean time between failures of one machine, as 90d or 2000h.",
    )] = ""  # fmt: skip
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
    overrides = overrides_from(None, options.sets or [])
    check_keys(overrides)
    check_values(overrides)
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
        paced=bool(config.pace_mbit), mtbf=_mtbf_of(options, run, notes), by_port=config.pacing == "auto",
    )  # fmt: skip
    return Question(workload_of(config, layers), machines, _encodings_of(options), -(-replicas // gpus), notes)


def _gpus_of(options: CostOptions, run: MeasuredRun | None) -> tuple[int, int]:
    """How many hosts, and how many GPUs on each."""
    if not options.gpus:
        if run is None:
            raise UsageError("how many GPUs? give --gpus N")
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


def _encodings_of(options: CostOptions) -> tuple[Encoding, ...]:
    names = [name for name in dict.fromkeys(options.codec or ()) if name != "raw"]
    for name in names:
        if name not in ENCODINGS:
            raise ConfigError(f"--codec {name}{meant(name, ENCODINGS)}: the planner knows {', '.join(ENCODINGS)}")
    return tuple(ENCODINGS[name] for name in names)
