"""Play a job on thousands of machines that are not there: how long are its steps, and what do failures cost?

The real coordinator decides about the members; how long a step takes is the arithmetic of ``rallypoint plan``.

    python benchmarks/simulate.py --workers 10000 --servers 1000 --standby 20 --mtbf 2111d --model 1B --compute 2s

On spot machines: --workers 1000 --servers 100 --standby 20 --spot 1 --taken 1d --notice 30s. Over 8 data centres:
--workers 8 --servers 8 --sites 8 --site-link 1Gbit --delay 50ms --local-steps 100 --fragments 4 --codec int8
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from rallypoint.core.plan.failures import NEVER
from rallypoint.core.plan.workload import SENT_BYTES, Workload, transformer
from rallypoint.errors import ConfigError, RallypointError, UsageError, to_install
from rallypoint.launch.commands.costing import count_of, rate_of, seconds_of
from rallypoint.launch.options import with_options
from rallypoint.launch.plan import option
from scale_cluster import ONE_SITE, SPEEDS, Play, PlayOutcome, Scenario, Sites, Size, sites_seconds

_CLUSTER, _JOB, _TROUBLE, _OUTPUT = "The cluster", "The job", "What goes wrong", "Output"


class ScaleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be played."""

    workers: Annotated[int, option(min=1, metavar="N", panel=_CLUSTER, help="Workers, with a replica each.")] = 1000
    servers: Annotated[int, option(min=1, metavar="N", panel=_CLUSTER, help="Servers.")] = 100
    racks: Annotated[int, option(
        min=0, metavar="N", panel=_CLUSTER, show_default=False, help="Racks, with an aggregator in each.",
    )] = 0  # fmt: skip
    standby: Annotated[int, option(min=0, metavar="N", panel=_CLUSTER, help="Workers that stand by.")] = 0
    link: Annotated[str, option(metavar="RATE", panel=_CLUSTER, help="A worker's link, in one direction.")] = "100Gbit"
    server_link: Annotated[str, option(
        metavar="RATE", panel=_CLUSTER, help="A server's, and the coordinator's, if it is another.",
    )] = ""  # fmt: skip
    aggregator_link: Annotated[str, option(
        metavar="RATE", panel=_CLUSTER, help="An aggregator's; by default that of a server.",
    )] = ""  # fmt: skip
    uplink: Annotated[str, option(
        metavar="RATE", panel=_CLUSTER, help="A rack's link to all others; by default nothing limits it.",
    )] = ""  # fmt: skip
    sites: Annotated[int, option(
        min=1, metavar="N", panel=_CLUSTER, help="Data centres; members are spread evenly over them.",
    )] = 1  # fmt: skip
    site_link: Annotated[str, option(
        metavar="RATE", panel=_CLUSTER, help="A data centre's link to all others, in one direction.",
    )] = "1Gbit"  # fmt: skip
    delay: Annotated[str, option(
        metavar="TIME", panel=_CLUSTER, help="From one data centre to another.",
    )] = "50ms"  # fmt: skip
    replication: Annotated[int, option(
        min=1, max=2, metavar="N", panel=_CLUSTER,
        help="2: each shard has a backup; with 1 a lost server costs a roll-back.",
    )] = 2  # fmt: skip
    heartbeat: Annotated[float, option(
        min=0.1, metavar="SECONDS", panel=_CLUSTER, help="Silence after which a machine is given up.",
    )] = 10.0  # fmt: skip
    steps: Annotated[int, option(min=1, metavar="N", panel=_JOB, help="Steps to play.")] = 100
    model: Annotated[str, option(metavar="N", panel=_JOB, help="The model's parameters, as 7e9, 7B or 350M.")] = "1B"
    compute: Annotated[str, option(metavar="TIME", panel=_JOB, help="How long a worker computes in a step.")] = "2s"
    local_steps: Annotated[int, option(
        min=1, metavar="H", panel=_JOB, help="Synchronise every H steps (rp.LocalSteps); then --steps are rounds,",
    )] = 1  # fmt: skip
    fragments: Annotated[int, option(
        min=1, metavar="F", panel=_JOB, help="... in F parts, one after the other, while the next steps are computed.",
    )] = 1  # fmt: skip
    codec: Annotated[str, option(
        metavar="NAME", panel=_JOB, help=f"What is sent, both ways: {', '.join(SENT_BYTES)}.",
    )] = "raw"  # fmt: skip
    mtbf: Annotated[str, option(
        metavar="TIME", panel=_TROUBLE,
        help="The mean time between failures of one machine, as 2111d (Llama 3's GPUs).",
    )] = ""  # fmt: skip
    away: Annotated[str, option(
        metavar="TIME", panel=_TROUBLE, help="How long until another machine comes in its place.",
    )] = "10min"  # fmt: skip
    spot: Annotated[float, option(
        min=0, max=1, metavar="SHARE", panel=_TROUBLE, help="This share of the workers are spot machines,",
    )] = 0.0  # fmt: skip
    taken: Annotated[str, option(
        metavar="TIME", panel=_TROUBLE,
        help="... each is taken away after this time in the mean (Google's preemptible ones lived for a day at most)",
    )] = "1d"  # fmt: skip
    notice: Annotated[str, option(
        metavar="TIME", panel=_TROUBLE, help="... and told so before: 30s (Google), 2min (AWS), none.",
    )] = "30s"  # fmt: skip
    stragglers: Annotated[float, option(
        min=0, max=1, metavar="SHARE", panel=_TROUBLE, help="This share of the workers computes slower,",
    )] = 0.0  # fmt: skip
    slowness: Annotated[float, option(min=1, metavar="TIMES", panel=_TROUBLE, help="... by so many times.")] = 1.5
    slow_links: Annotated[float, option(
        min=0, max=1, metavar="SHARE", panel=_TROUBLE, help="This share of the workers has links of half the rate.",
    )] = 0.0  # fmt: skip
    seed: Annotated[int, option(min=0, metavar="N", panel=_TROUBLE, help="Of all that is drawn.")] = 0
    plot: Annotated[Path | None, option(
        metavar="FILE", panel=_OUTPUT, help="Draw the seconds of each step into this file, as .png or .svg.",
    )] = None  # fmt: skip
    json: Annotated[bool, option(
        "--json", metavar=None, panel=_OUTPUT, help="As JSON, on the standard output.",
    )] = False  # fmt: skip


def scenario_of(options: ScaleOptions) -> Scenario:
    """The scenario that these options describe. ConfigError says which one is impossible.

    A step may be longer than the heartbeat that was asked for: nothing here depends on it but how soon a loss is seen.
    """
    words = count_of(options.model, "--model")
    if words < 1000:
        raise ConfigError(f"--model {options.model}: that is no model; write its parameters, as 350M")
    if options.racks > options.workers:
        raise ConfigError(f"{options.racks} racks and {options.workers} workers: some would be empty")
    if options.servers < options.replication:
        raise ConfigError(f"--replication {options.replication} needs as many servers, not {options.servers}")
    if options.codec not in SENT_BYTES:
        raise ConfigError(f"--codec {options.codec}: this knows {', '.join(SENT_BYTES)}")
    if options.racks and options.codec != "raw":
        raise ConfigError(f"--codec {options.codec}: an aggregator (--racks) sends on what it has added up as it is")
    if options.local_steps % options.fragments:
        raise ConfigError(f"--fragments {options.fragments}: --local-steps {options.local_steps} is no multiple of it")
    workload = Workload(
        layers=transformer(words, seconds_of(options.compute, "--compute")), steps=options.local_steps,
        up=SENT_BYTES[options.codec], down=SENT_BYTES[options.codec],
    )  # fmt: skip
    rate = rate_of(options.link, "--link")
    server_rate = rate_of(options.server_link, "--server-link") if options.server_link else rate
    size = Size(
        workers=options.workers, servers=options.servers, racks=options.racks, standby=options.standby,
        replication=options.replication, heartbeat=options.heartbeat,
    )  # fmt: skip
    return Scenario(
        size=size, workload=workload, rate=rate, server_rate=server_rate,
        aggregator_rate=rate_of(options.aggregator_link, "--aggregator-link") if options.aggregator_link else 0.0,
        uplink=rate_of(options.uplink, "--uplink") if options.uplink else 0.0, steps=options.steps,
        sites=_sites_of(options), spot=options.spot, taken=seconds_of(options.taken, "--taken"),
        notice=0.0 if options.notice == "none" else seconds_of(options.notice, "--notice"),
        mtbf=seconds_of(options.mtbf, "--mtbf") if options.mtbf else NEVER, away=seconds_of(options.away, "--away"),
        stragglers=options.stragglers, slowness=options.slowness, slow_links=options.slow_links, seed=options.seed,
    )  # fmt: skip


def _sites_of(options: ScaleOptions) -> Sites:
    """The data centres. With racks, an aggregator of each one sends; else each worker."""
    if options.sites < 2:
        return ONE_SITE
    if options.sites > min(options.workers, options.servers):
        raise ConfigError(f"--sites {options.sites}: some would have no worker, or no server")
    return Sites(
        count=options.sites, rate=rate_of(options.site_link, "--site-link"),
        delay=seconds_of(options.delay, "--delay"), replication=options.replication, fragments=options.fragments,
        senders=max(1, (options.racks or options.workers) // options.sites),
    )  # fmt: skip


def limits_of(scenario: Scenario) -> dict[str, float]:
    """The seconds that each thing would take of an undisturbed step if all others took none."""
    workload, size = scenario.workload, scenario.size
    senders = size.racks or size.workers
    nbytes = workload.nbytes
    limits = {
        "computing": workload.compute * workload.steps,
        "a worker's link": nbytes / scenario.rate,
        "a server's link": senders * nbytes / size.servers / scenario.server_rate,
        "a server's cores": SPEEDS.server(senders, nbytes / size.servers),
    }
    if size.racks:
        near = size.workers / size.racks
        limits["an aggregator's link"] = near * nbytes / (scenario.aggregator_rate or scenario.server_rate)
    if scenario.sites.count > 1:
        bound = workload.steps * sites_seconds(workload, msgspec.structs.replace(scenario.sites, delay=0.0), 0.0)
        limits["a data centre's link"] = bound
    if size.racks and scenario.uplink:
        limits["a rack's uplink"] = nbytes / scenario.uplink
    return limits


def check_plot(path: Path) -> None:
    """UsageError if matplotlib is not installed, `path` has no ending that it knows, or its folder does not exist."""
    kinds = (".png", ".svg", ".pdf")
    if path.suffix not in kinds:
        raise UsageError(f"--plot {path}: name a file that ends with {', '.join(kinds)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib: {to_install('plots')}")


def answer(options: ScaleOptions, console: Console) -> None:
    """Play the scenario of these options and print what came of it. Errors are those of `scenario_of`."""
    if options.plot is not None:
        check_plot(options.plot)
    scenario = scenario_of(options)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("steps", total=scenario.steps)
        outcome = Play(scenario).run(lambda step: progress.update(task, completed=step.number + 1))
    if options.json:
        sys.stdout.write(msgspec.json.encode(as_data(scenario, outcome)).decode() + "\n")
    else:
        console.print("\n".join(lines(scenario, outcome)))
    if options.plot is not None:
        draw(outcome, options.plot)


def as_data(scenario: Scenario, outcome: PlayOutcome) -> dict[str, object]:
    """Everything, for programs."""
    return {**msgspec.to_builtins(outcome), "limits": limits_of(scenario)}


def lines(scenario: Scenario, outcome: PlayOutcome) -> list[str]:
    """What came of it, for people."""
    size, one = scenario.size, outcome.view
    one_of = "step" if scenario.workload.steps == 1 else "round"
    sites = "" if scenario.sites.count < 2 else f", {scenario.sites.count} data centres"
    racks = f", {size.racks} racks with an aggregator" if size.racks else ""
    took = sum(step.seconds for step in outcome.steps)
    limits = sorted(limits_of(scenario).items(), key=lambda limit: -limit[1])
    machine = sorted(outcome.machine.items(), key=lambda kind: -kind[1][0])[:6]
    return [
        f"{size.workers:,} workers, {size.servers:,} servers{racks}{sites}: {len(outcome.steps)} {one_of}s in "
        f"{took:,.0f} s",
        f"a {one_of}: {outcome.ideal:.3g} s when nothing fails; goodput {outcome.goodput:.1%} with {outcome.failures} "
        f"failures, {outcome.rollbacks} roll-backs"
        + (f", {outcome.taken} spot machines taken away" if scenario.spot else ""),
        f"the limits of a {one_of}, each alone: " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in limits),
        f"blocks that a sender pushes of a shard: {max(step.blocks for step in outcome.steps):.2f} at most",
        f"connections of a server: {outcome.connections:,}; of the coordinator: {one.members:,}",
        f"a view: {one.view / 1e3:,.0f} kB, {one.message / 1e3:,.0f} kB with a worker's tickets; to all members "
        f"{one.total / 1e9:.3g} GB, {outcome.view_seconds:.3g} s, once at the beginning",
        f"the {outcome.views} views after it, as differences: {outcome.mean_change / 1e3:,.3g} kB to a member, "
        f"{outcome.largest_change / 1e3:,.3g} at most; they took {outcome.coordinator:.2%} of the coordinator's time",
        "the coordinator's machine, on this computer: "
        + ", ".join(f"{kind} {1e6 * spent / count:,.0f} us x {count:,}" for kind, (spent, count) in machine),
    ]


def draw(outcome: PlayOutcome, path: Path) -> None:
    """Draw the seconds of each step. UsageError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(outcome.steps))
    axes.bar(places, [step.seconds for step in outcome.steps], color="#f2a45c", label="with failures")
    axes.bar(places, [step.undisturbed for step in outcome.steps], color="#4c78a8", label="undisturbed")
    axes.set_xlabel("steps, in the order in which they were computed")
    axes.set_ylabel("seconds")
    axes.legend()
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


@with_options(ScaleOptions)
def simulate(options: ScaleOptions) -> None:
    """Play a job on thousands of machines that are not there: how long are its steps, and what do failures cost?"""
    from rallypoint.launch.console import Screen

    try:
        answer(options, Screen(highlight=False))
    except RallypointError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    typer.run(simulate)
