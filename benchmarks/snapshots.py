"""What a snapshot costs training, and when it is durable: Rallypoint against torch's distributed checkpoints (DCP).

    python benchmarks/snapshots.py                          # 100 M parameters: 1.2 GB with AdamW's state
    python benchmarks/snapshots.py --pad 2                  # as where an accelerator computes: the cores have time
    python benchmarks/snapshots.py --layers 4 --rounds 1    # a smaller one
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from cluster import BenchmarkFailed, Case, Members, Spread, main, report, site, table
from snapshots_member import Design, Result, Task

DESIGNS: tuple[Design, ...] = ("rallypoint", "dcp-thread", "dcp-process", "dcp-blocking")
NAMES: Mapping[Design, str] = {
    "rallypoint": "Rallypoint", "dcp-thread": "DCP async, thread", "dcp-process": "DCP async, process",
    "dcp-blocking": "DCP save",
}  # fmt: skip


class Figures(msgspec.Struct, frozen=True):
    """One design's: seconds. `longest`: the longest step while a snapshot is under way, over the usual one; `lost`: how
    much longer all of those steps took together; `noise`: the longest step when none is, over the usual one."""

    design: Design
    usual: Spread
    noise: float
    longest: Spread
    lost: Spread
    durable: Spread
    first_longest: float


@dataclass(frozen=True, slots=True)
class Price:
    """One snapshot's: seconds."""

    longest: float
    lost: float
    durable: float


def run_once(task: Task, servers: int) -> Result:
    """Start all members, train, end them."""
    with site(Case(1, servers, None)) as at, Members() as members:
        ours = task.design == "rallypoint"
        if ours:
            members.start_rallypoint(at, snapshot_steps=task.every)
        tasks = [msgspec.structs.replace(task, folder=str(members.folder / "checkpoints"))]
        members.start_workers(at, "snapshots_member.py", tasks)
        members.wait(900.0)
        return from_log(members.folder / "events.jsonl") if ours else members.results(at, Result)[0]


def from_log(path: Path) -> Result:
    """What the coordinator saw: a version exists when its step is done, a snapshot when its manifest is written."""
    events = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    done = {event["step"]: event["t"] for event in events if event["type"] == "StepDone"}
    last = max(done) + 1
    saves = [
        (done[event["version"] - 1], event["t"])
        for event in events if event["type"] == "Snapshotted" and 0 < event["version"] < last
    ]  # fmt: skip
    return Result([done[step] for step in sorted(done)], saves)


def prices(result: Result, warm_up: int) -> tuple[list[float], list[Price]]:
    """The steps that no snapshot touched, and each snapshot's price beside their median."""
    steps = list(zip(result.starts[warm_up:], result.starts[warm_up + 1 :], strict=False))
    touched = [[(a, b) for a, b in steps if a < durable and b > began] for began, durable in result.saves]
    undisturbed = [b - a for a, b in steps if not any((a, b) in group for group in touched)]
    if not undisturbed or not result.saves:
        raise BenchmarkFailed("no step without a snapshot, or no snapshot: use more steps, or fewer snapshots")
    usual = statistics.median(undisturbed)
    return undisturbed, [
        Price(
            max(b - a for a, b in group) - usual, sum(b - a - usual for a, b in group), durable - began
        )
        for (began, durable), group in zip(result.saves, touched, strict=True) if group
    ]  # fmt: skip


def figures(design: Design, results: Sequence[Result], warm_up: int) -> Figures:
    """Of all rounds; the first snapshot of each stands apart, its memory is fresh."""
    undisturbed: list[float] = []
    paid: list[Price] = []
    first: list[Price] = []
    for result in results:
        steps, found = prices(result, warm_up)
        undisturbed += steps
        first += found[:1]
        paid += found[1:] or found
    usual = Spread.of(undisturbed)
    return Figures(
        design, usual, usual.greatest - usual.median, Spread.of([p.longest for p in paid]),
        Spread.of([p.lost for p in paid]), Spread.of([p.durable for p in paid]), max(p.longest for p in first),
    )  # fmt: skip


COLUMNS = (
    "design", "", "usual step", "longest", "longest with one", "the first", "training lost", "durable after",
)  # fmt: skip


def row(found: Figures) -> list[str]:
    """A line of the table."""
    return [
        NAMES[found.design], "s", f"{found.usual.median:.3f}", f"+{found.noise:.3f}", f"+{found.longest.show()}",
        f"+{found.first_longest:.3f}", found.lost.show(), found.durable.show(2),
    ]  # fmt: skip


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    layers: Annotated[int, typer.Option(min=1, help="Square matrices in the model.")] = 24,
    width: Annotated[int, typer.Option(min=8, help="Their width.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a step: makes it last.")] = 64,
    pad: Annotated[float, typer.Option(min=0.0, help="Seconds of every step that the worker sleeps.")] = 0.0,
    servers: Annotated[int, typer.Option(min=1, help="Rallypoint's servers (there is one worker).")] = 1,
    every: Annotated[int, typer.Option(min=2, help="Steps between snapshots.")] = 10,
    snapshots: Annotated[int, typer.Option(min=1, help="Snapshots in a round.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each one all designs, one after the other.")] = 2,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
) -> None:
    """Train a plain stack of layers on this machine's loopback and snapshot it every few steps.

    A snapshot is under way from when its version exists until it is durable (synced to the disk, and named complete).
    """
    console = Console(highlight=False)
    steps, warm_up = (snapshots + 1) * every, 2
    results: dict[Design, list[Result]] = {design: [] for design in DESIGNS}
    for number in range(rounds):
        for design in DESIGNS:
            task = Task(design, layers, width, batch, pad, steps, every, "")
            results[design].append(run_once(task, servers))
            console.print(f"{NAMES[design]}, round {number + 1} is over", style="dim")
    found = [figures(design, results[design], warm_up) for design in DESIGNS]
    state = 12 * layers * width * width
    title = (
        f"{layers * width * width / 1e6:.0f} M parameters, {state / 1e9:.2f} GB with AdamW's state; one process, or one"
        f" worker and {servers} servers; steps padded by {pad:g} s\na snapshot every {every} steps; longest steps: over"
        " the usual one, without a snapshot and with one under way"
    )
    report(console, [table(title, COLUMNS, [row(each) for each in found])], found, json)


if __name__ == "__main__":
    main(app)
