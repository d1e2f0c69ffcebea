"""How fast a GPT trains: Rallypoint against DistributedDataParallel over Gloo, on links of a known rate.

    python benchmarks/train.py --goals                              # 4+4 on 1 Gbit/s links, then loopback with 2+1
    python benchmarks/train.py --workers 4 --servers 2 --rate 500   # one case (netlab: needs root)
    python benchmarks/train.py --loopback --workers 2 --servers 1   # plain loopback
    python benchmarks/train.py --durable                            # what replication and snapshots cost
    python benchmarks/train.py --durable --server-rate 1250         # where servers' links carry what replication adds
    python benchmarks/train.py --design rallypoint --design replicated --batch 4     # these two, with more to compute
    python benchmarks/train.py --accelerator 0.034                  # blocks sleep, as if an accelerator computed them
    python benchmarks/train.py --design ddp --design hook --design fsdp2 --design backend      # torch's own, by servers
    python benchmarks/train.py --ratio 0.5 --ratio 1 --ratio 2      # the same: computing takes so many times K/B
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cluster import Case, Members, Site, Spread, main, report, site, step_times, table
from rallypoint.recipes.gpt_model import GPT, GPTConfig
from train_member import Design, Result, Task

DESIGNS: tuple[Design, ...] = ("rallypoint", "ddp", "alone")
DURABLE: tuple[Design, ...] = ("rallypoint", "replicated", "snapshots", "durable", "ddp", "alone")
ACCELERATED: tuple[Design, ...] = ("rallypoint", "ddp", "fsdp2", "alone")
ALL: tuple[Design, ...] = (
    "rallypoint", "replicated", "snapshots", "durable", "ddp", "hook", "fsdp2", "backend", "alone",
)  # fmt: skip
NAMES: Mapping[Design, str] = {
    "rallypoint": "Rallypoint", "replicated": "+ replication 2", "snapshots": "+ snapshots every 10 s",
    "durable": "+ both", "ddp": "DDP over Gloo", "hook": "DDP, hook", "fsdp2": "FSDP2 over Gloo",
    "backend": "FSDP2, backend",
    "alone": "compute only",
}  # fmt: skip
REPLICATED: tuple[Design, ...] = ("replicated", "durable")
SERVED: tuple[Design, ...] = ("rallypoint", "snapshots", "hook", "backend", *REPLICATED)
SUMS: tuple[Design, ...] = ("hook", "backend")  # scripts that have no settings of the job's: the launcher's count
STATES: Mapping[Design, int] = {
    "rallypoint": 2, "replicated": 2, "snapshots": 2, "durable": 2, "ddp": 4, "hook": 4, "fsdp2": 4,
    "backend": 4, "alone": 2,
}  # fmt: skip
"""Vectors as long as the model in a worker: parameters and gradients; under DDP also AdamW's two; under FSDP2 these
four are shared out among the workers."""

SHARED: tuple[Design, ...] = ("fsdp2", "backend")

GOALS = (Case(4, 4, 1000.0), Case(2, 1, None))
_CURVE_POINTS = 8
_LAST = 5  # losses that make the loss at the end


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and how often."""

    model: GPTConfig
    batch: int
    lr: float
    steps: int
    warm_up: int
    rounds: int
    sets: Mapping[str, Any]
    designs: tuple[Design, ...] = DESIGNS
    accelerator: float = 0.0  # seconds of sleep of each block's forward, half of those of its backward

    @property
    def model_bytes(self) -> int:
        """K: of all parameters."""
        return 4 * sum(parameter.numel() for parameter in GPT(self.model).parameters())

    def settings(self, workers: int) -> dict[str, object]:
        """Those of `job.train`. One step more than measured: a step ends where the next begins."""
        return {
            "replicas": workers, "batch": self.batch, "steps": self.warm_up + self.steps + 1, "seed": 1,
            "optimizer": {"type": "adamw", "lr": self.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}, **self.sets,
        }  # fmt: skip


class Trained(msgspec.Struct, frozen=True):
    """What one design's runs in one case gave, round after round."""

    steps: list[float]
    losses: list[float]  # of the first round: every round has the same
    peaks: list[int]


class Figures(msgspec.Struct, frozen=True):
    """One line of the table. `limit` is the greater of `compute` and `wire` (K/B, with B that of the busiest link),
    in seconds; `peak` and `analytic` are bytes per worker; `ratio` is to Rallypoint's median step, round by round."""

    case: str
    design: str
    step: Spread
    samples: Spread
    ratio: Spread | None
    tokens: float
    limit: float
    compute: float
    wire: float
    peak: int
    analytic: int
    final_loss: float | None
    losses: list[float]


def name(case: Case, plan: Plan) -> str:
    """How the tables call it: ``4+4, 1000 Mbit/s, 34 ms``."""
    return f"{case.name}, {1000 * plan.accelerator:.0f} ms" if plan.accelerator else case.name


def measure(case: Case, plan: Plan, console: Console) -> list[Figures]:
    """All designs in turn, `rounds` times, on the same links."""
    runs: dict[Design, list[Trained]] = {design: [] for design in plan.designs}
    with site(case) as at:
        for number in range(plan.rounds):
            for design in plan.designs if number % 2 == 0 else reversed(plan.designs):  # a machine's speed drifts
                run = run_once(at, plan, design)
                runs[design].append(run)
                spread = Spread.of(run.steps).show()
                what = f"{name(case, plan)}: {NAMES[design]}, round {number + 1}"
                console.print(f"{what}: {spread} s a step", style="dim")
    return [figures(case, plan, design, runs) for design in plan.designs]


def run_once(at: Site, plan: Plan, design: Design) -> Trained:
    """Start all members, train, end them."""
    workers = len(at.workers)
    tasks = [
        Task(design, rank, workers, plan.model, plan.settings(workers), plan.accelerator) for rank in range(workers)
    ]
    with Members() as members:
        if design in SERVED:
            members.start_rallypoint(
                at, replication=2 if design in REPLICATED else 1,
                snapshot_seconds=10.0 if design in ("snapshots", "durable") else 0.0,
                overrides=plan.sets if design in SUMS else {},
            )  # fmt: skip
        members.start_workers(at, "train_member.py", tasks)
        members.wait(900.0)
        results = members.results(at, Result)
    began, losses = by_step(results)
    return Trained(step_times([began], plan.warm_up), losses, [result.peak_bytes for result in results])


def by_step(results: Sequence[Result]) -> tuple[list[float], list[float]]:
    """When the last worker began with each step, and the step's loss: replicas may have moved between workers."""
    began: dict[int, list[float]] = {}
    losses: dict[int, list[float]] = {}
    for result in results:
        firsts = dict(zip(reversed(result.steps), reversed(result.began), strict=True))  # of two replicas, the first
        for step, at in firsts.items():
            began.setdefault(step, []).append(at)
        for step, loss in zip(result.steps, result.losses, strict=True):
            losses.setdefault(step, []).append(loss)
    return [max(began[step]) for step in sorted(began)], [statistics.fmean(losses[step]) for step in sorted(losses)]


def merge(runs: Sequence[Trained]) -> Trained:
    """All rounds as one."""
    steps = [seconds for run in runs for seconds in run.steps]
    return Trained(steps, runs[0].losses, [peak for run in runs for peak in run.peaks])


def ratio(run: Sequence[Trained], to: Sequence[Trained]) -> Spread:
    """Of the median steps of each round."""
    pairs = zip(run, to, strict=True)
    return Spread.of([statistics.median(ours.steps) / statistics.median(theirs.steps) for ours, theirs in pairs])


def figures(case: Case, plan: Plan, design: Design, runs: Mapping[Design, Sequence[Trained]]) -> Figures:
    """The figures of one design, with the limit that the others' give."""
    run, compute = merge(runs[design]), statistics.median(merge(runs["alone"]).steps)
    model_bytes = plan.model_bytes
    batch = case.workers * plan.batch
    copies = case.workers * (design in SERVED) + (design in REPLICATED)
    samples = Spread.of([batch / seconds for seconds in run.steps])
    wire = case.wire_seconds(model_bytes, copies)
    return Figures(
        case=name(case, plan), design=design, step=Spread.of(run.steps), samples=samples,
        ratio=ratio(runs[design], runs["rallypoint"]) if "rallypoint" in runs else None,
        tokens=samples.median * plan.model.block, limit=max(compute, wire), compute=compute, wire=wire,
        peak=max(run.peaks), analytic=STATES[design] * model_bytes // (case.workers if design in SHARED else 1),
        final_loss=None if design == "alone" else statistics.fmean(run.losses[-_LAST:]),
        losses=[] if design == "alone" else run.losses,
    )  # fmt: skip


COLUMNS = (
    "case", "design", "samples/s [min..max]", "tokens/s", "s a step", "longest", "compute x K/B", "x limit",
    "x Rallypoint [rounds]", "peak MB", "analytic MB", "last loss",
)  # fmt: skip


def row(found: Figures) -> list[str]:
    """A line of the table."""
    return [
        found.case, NAMES[found.design], found.samples.show(2), f"{found.tokens:.0f}", f"{found.step.median:.3f}",  # type: ignore[index]
        f"{found.step.greatest:.3f}", f"{found.compute / found.wire:.2f}" if found.wire else "",
        f"{found.step.median / found.limit:.2f}",
        "" if found.ratio is None else found.ratio.show(2), f"{found.peak / 1e6:.0f}", f"{found.analytic / 1e6:.0f}",
        "" if found.final_loss is None else f"{found.final_loss:.4f}",
    ]  # fmt: skip


def curves(case: str, found: Sequence[Figures]) -> Table:
    """The losses of all designs side by side, at a few steps."""
    learning = [figure for figure in found if figure.losses]
    last = len(learning[0].losses) - 1
    points = sorted({round(i * last / (_CURVE_POINTS - 1)) for i in range(_CURVE_POINTS)})
    lines = [
        [NAMES[figure.design], "nats/byte", *(f"{figure.losses[step]:.4f}" for step in points)]  # type: ignore[index]
        for figure in learning
    ]
    return table(f"loss, {case}", ["design", "", *(f"step {step}" for step in points)], lines)


def run(cases: Sequence[tuple[Case, Plan]], path: Path | None) -> None:
    """Measure, print, write."""
    console = Console(highlight=False)
    found = {name(case, plan): measure(case, plan, console) for case, plan in cases}
    every = [figure for figures in found.values() for figure in figures]
    plan = cases[0][1]
    size = plan.model_bytes
    title = (
        f"a GPT of {size / 4e6:.1f} M parameters (K = {size / 1e6:.0f} MB), {plan.batch} x {plan.model.block} bytes a "
        "worker\nlimit: max(compute, K/B), with replication the servers' (W+1)K/SB; peak: a worker's memory over its "
        "imports and data\nanalytic: parameters + gradients (+ AdamW's state under DDP and FSDP2), without activations"
    )
    if plan.accelerator:
        title += "\n... ms: what each block sleeps in its forward; twice that in its backward"
    tables = [table(title, COLUMNS, [row(figure) for figure in every])]
    report(console, tables + [curves(case, figures) for case, figures in found.items()], every, path)


def accelerated(case: Case, plan: Plan, seconds: Sequence[float], ratios: Sequence[float]) -> list[tuple[Case, Plan]]:
    """One plan for each sleep, given in `seconds` of a block's forward, or by what it makes of compute / (K/B)."""
    per_step = 3 * plan.model.layers
    every = [*seconds, *(ratio * case.wire_seconds(plan.model_bytes) / per_step for ratio in ratios)]
    return [(case, replace(plan, accelerator=sleep)) for sleep in every]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    goals: Annotated[bool, typer.Option("--goals", help="The project's two cases, instead of one.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Workers; each computes one replica.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Reduction servers.")] = 4,
    rate: Annotated[float, typer.Option(help="Mbit/s of every link, both directions (netlab: needs root).")] = 1000.0,
    server_rate: Annotated[float | None, typer.Option(help="That of the servers' links, if it is another.")] = None,
    loopback: Annotated[bool, typer.Option("--loopback", help="No links: all on this machine's loopback.")] = False,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the GPT.")] = 6,
    width: Annotated[int, typer.Option(min=8, help="Its width, a multiple of 8 (it has 8 heads).")] = 512,
    block: Annotated[int, typer.Option(min=1, help="Bytes in a sample.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a worker at a step.")] = 1,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 3e-4,
    steps: Annotated[int, typer.Option(min=1, help="Steps measured in a round.")] = 20,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps before those.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each one all designs, one after the other.")] = 3,
    shard_kib: Annotated[int | None, typer.Option(min=1, help="Rallypoint's shards, in KiB.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Shards under way from a worker to a server.")] = None,
    in_flight_kib: Annotated[
        int | None, typer.Option(min=0, help="KiB on their way to one machine at once; 0: the kernel's own windows.")
    ] = None,
    pace: Annotated[float | None, typer.Option(min=0.0, help="Rallypoint's pace_mbit.")] = None,
    unpaced: Annotated[bool, typer.Option("--unpaced", help="Rallypoint with pacing=off.")] = False,
    durable: Annotated[bool, typer.Option("--durable", help="Also with replication 2, snapshots, and both.")] = False,
    accelerator: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="Each block sleeps so many seconds in its forward, and twice that in its backward."),
    ] = None,
    ratio: Annotated[
        list[float] | None, typer.Option(min=0.0, help="The same, given as what the sleeps are in K/B.")
    ] = None,
    design: Annotated[
        list[str] | None, typer.Option(help=f"Only this, and compute only; repeatable: {', '.join(ALL[:-1])}.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
) -> None:
    """Train a GPT on text with Rallypoint and with DDP over Gloo: same model, samples, optimizer, links; interleaved.

    With an accelerator also with FSDP2 over Gloo.

    A third run only computes (forward and backward in as many processes at once). The limit of a step is the greater
    of that and K/B, the time the busiest link takes: servers that replicate carry the gradients once more.
    """
    sets: dict[str, float | str | None] = {
        "network.shard_bytes": shard_kib and shard_kib * 1024, "network.window": window
    }
    sets["network.in_flight_bytes"] = in_flight_kib and in_flight_kib * 1024
    sets["network.pace_mbit"] = pace
    sets["network.pacing"] = "off" if unpaced else None
    designs = DURABLE if durable else ACCELERATED if accelerator or ratio else DESIGNS
    if design:
        if unknown := set(design) - set(ALL):
            known = ", ".join(ALL[:-1])
            raise typer.BadParameter(f"{', '.join(sorted(unknown))}: use {known}", param_hint="--design")
        designs = tuple(name for name in ALL if name in {*design, "alone"})
    plan = Plan(
        GPTConfig(layers=layers, heads=8, width=width, block=block), batch, lr, steps, warm_up, rounds,
        {name: value for name, value in sets.items() if value is not None}, designs,
    )  # fmt: skip
    case = Case(workers, servers, None if loopback else rate, None if loopback else server_rate)
    slept = accelerated(case, plan, accelerator or (), ratio or ())
    run(slept or [(case, plan) for case in (GOALS if goals else (case,))], json)


if __name__ == "__main__":
    main(app)
