"""Plays a scenario and says what came of it: as lines for people, as JSON, as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from rallypoint.errors import UsageError
from rallypoint.launch.costing.shown import check_chart
from rallypoint.testing.scale.play import Outcome, Play, Scenario
from rallypoint.testing.scale.question import ScaleOptions, limits_of, scenario_of


def answer(options: ScaleOptions, console: Console) -> None:
    """Play the scenario of these options and print what came of it. Errors are those of `scenario_of`."""
    if options.plot is not None:
        check_chart(options.plot)
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


def as_data(scenario: Scenario, outcome: Outcome) -> dict[str, object]:
    """Everything, for programs."""
    return {**msgspec.to_builtins(outcome), "limits": limits_of(scenario)}


def lines(scenario: Scenario, outcome: Outcome) -> list[str]:
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


def draw(outcome: Outcome, path: Path) -> None:
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
