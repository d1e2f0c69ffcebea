"""What each way to synchronise costs and buys: speed, bytes, and how soon the model is as good as DDP makes it.

    python benchmarks/strategies.py --quick --json quick.json      # 7 rows, 100 Mbit/s, equal workers: some minutes
    python benchmarks/strategies.py --json gpt.json                # every row, 100 and 1000 Mbit/s, equal and uneven
    python benchmarks/strategies.py --model resnet --json resnet.json
    python benchmarks/strategies.py --rows ddp,async --rates 100 --uneven --seeds 3
    python benchmarks/strategies.py --tune 0.5,1,2 --rows async    # last loss at other rates; no limited links, no root

The same for every row: the model, its first weights, the data and their order, the samples in all. A mode with updates
of all replicas makes each of the same `batch` samples. Where a replica has a clock of its own (SSP, Async) it makes as
many steps as DDP, each of its share of the batch; with local steps likewise. What a quorum leaves out counts as given.

Fair to DDP: its ranks have equal batches, because it cannot have others, so a slow worker sets its pace, by design.
The others compute R replicas, R being as many as workers or, with half the batch, twice as many: what the limit says is
faster in that case (the table has it). So a slow worker's replicas may move to others, at the price of a gradient
each; not where replicas keep something on their worker (error feedback, local steps), which wait for it as DDP does. A
slow worker's every replica takes `--slow` times as long, padded by sleeping, as every worker's (see
strategies_workloads.py); DDP's rank is padded by the same code.

Clock: from when the first worker begins to compute, with everything connected and the first parameters everywhere.
Evaluation is not on it: worker 0 keeps copies of the parameters and evaluates them afterwards. Time and samples to the
goal are interpolated between the last copy above it and the first below. The goal is the baseline's last loss times
`--margin` (and a workload's slack); the baseline is DDP with the same optimizer on the same links and seed.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cluster import BenchmarkFailed, Case, Members, Site, main, report, site, table
from rallypoint.errors import RallypointError
from strategies_member import Result, Task
from strategies_rows import (
    QUICK,
    ROWS,
    baseline_of,
    choose_replicas,
    least_seconds,
    optimizer,
    rows_of,
    settings_with,
)
from strategies_workloads import WORKLOADS, Workload, build, shapes

_STEADY = (0.2, 0.9)  # of the samples: between those the speed is taken
_ERROR = re.compile(r"(?:rallypoint\.errors\.\w+|error): (.*)")
_SHARD_BYTES = 64 << 10  # a few MB on slow links: the first shard travels up alone and the last one down


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, for every case."""

    model: str
    rows: tuple[str, ...]
    seeds: int
    margin: float
    patience: float
    steps: int
    factors: tuple[float, ...] = (1.0,)

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.model]


@dataclass(frozen=True, slots=True)
class Setting:
    """A case, and how many times slower its last worker is."""

    case: Case
    slow: float

    @property
    def name(self) -> str:
        """How the tables call it."""
        return self.case.name + (", equal workers" if self.slow == 1 else f", one worker {self.slow:g} x slower")


class Point(msgspec.Struct, frozen=True):
    """Seconds and samples since the beginning, and the validation loss then."""

    seconds: float
    samples: int
    loss: float


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One training. What has an `error` has no figures; bytes are a worker's mean a step, None without links.

    `seconds` is a step's, from the steady samples a second, and `limit` the least it can be; `computing` the processor
    seconds of worker 0 for a replica, which must be less than the padding; `shares` the replicas' steps on each worker.
    """

    setting: str
    model: str
    row: str
    seed: int
    factor: float
    replicas: int
    batch: int
    limit: float
    error: str | None = None
    seconds: float = 0.0
    up: float | None = None
    down: float | None = None
    computing: float = 0.0
    shares: list[int] = []
    curve: list[Point] = []
    goal: float | None = None
    seconds_to_goal: float | None = None
    samples_to_goal: float | None = None

    @property
    def final(self) -> float | None:
        """The last validation loss, in nats."""
        return self.curve[-1].loss if self.curve else None


# ---- running -------------------------------------------------------------------------------------------------------


def run_setting(setting: Setting, plan: Plan, console: Console, into: list[Trial]) -> None:
    """Every row with every seed, one after the other on the same links; what is done is in `into` at once."""
    with site(setting.case) as at:
        for seed in range(plan.seeds):
            goals: dict[str, float] = {}
            for name in plan.rows:
                for factor in plan.factors:
                    trial = run_row(at, setting, plan, name, seed, factor)
                    if trial.final is not None and baseline_of(plan.model, name) == name:
                        goals.setdefault(name, trial.final * plan.margin + plan.workload.slack)
                    trial = with_goal(trial, goals.get(baseline_of(plan.model, name)))
                    into.append(trial)
                    console.print(f"{setting.name}: {said(trial)}", style="dim", soft_wrap=True)


def run_row(at: Site, setting: Setting, plan: Plan, name: str, seed: int, factor: float) -> Trial:
    """One training; a failure is a trial with an error."""
    row, workload, case = ROWS[name], plan.workload, setting.case
    model = shapes(build(workload, seed))
    seconds = workload.batch * workload.sample_seconds
    replicas = choose_replicas(row, case, setting.slow, seconds, model)
    limit = least_seconds(row, case, replicas, setting.slow, seconds, model)
    trial = Trial(
        setting=setting.name, model=plan.model, row=name, seed=seed, factor=factor, replicas=replicas,
        batch=workload.batch, limit=limit,
    )  # fmt: skip
    settings = {
        "replicas": replicas, "batch": workload.batch // replicas, "steps": plan.steps, "seed": 1 + seed,
        "optimizer": msgspec.to_builtins(optimizer(plan.model, name, plan.steps, factor)),
        "network.shard_bytes": _SHARD_BYTES, **settings_with(row, replicas),
    }  # fmt: skip
    slowness = [1.0] * (case.workers - 1) + [setting.slow]
    tasks = [
        Task(plan.model, rank, case.workers, seed, slow, settings, row.hook) for rank, slow in enumerate(slowness)
    ]
    try:
        results = _train(at, tasks, plan.patience)
    except BenchmarkFailed as failure:
        return msgspec.structs.replace(trial, error=sentence(failure))
    return figures(trial, results, plan.steps, has_links=case.rate_mbit is not None)


def _train(at: Site, tasks: Sequence[Task], patience: float) -> list[Result]:
    with Members() as members:
        if tasks[0].hook is None:
            members.start_rallypoint(at)
        members.start_workers(at, "strategies_member.py", tasks)
        members.wait(patience)
        return members.results(at, Result)


def sentence(failure: BenchmarkFailed) -> str:
    """What the members said of themselves: their error, or their last line."""
    first, *lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    return errors[0] if errors else ": ".join([first, *lines[-1:]])


# ---- figures -------------------------------------------------------------------------------------------------------


def figures(trial: Trial, results: Sequence[Result], steps: int, *, has_links: bool) -> Trial:
    """The trial with what its workers wrote."""
    began = min(result.began for result in results)
    finishes = sorted(at - began for result in results for at in result.finishes)
    share = trial.batch // trial.replicas
    first, last = (round(part * (len(finishes) - 1)) for part in _STEADY)
    rate = (last - first) * share / (finishes[last] - finishes[first])
    curve = [
        Point(max(0.0, at.at - began), share * bisect.bisect_right(finishes, at.at - began), at.loss)
        for at in results[0].curve
    ]
    up, down = (statistics.fmean(getattr(result, field) for result in results) for field in ("up_bytes", "down_bytes"))
    return msgspec.structs.replace(
        trial, seconds=trial.batch / rate, curve=curve, computing=results[0].computing,
        shares=[len(result.finishes) for result in results],
        up=up / steps if has_links else None, down=down / steps if has_links else None,
    )  # fmt: skip


def with_goal(trial: Trial, goal: float | None) -> Trial:
    """The trial with when it reached the goal, if there is one and it did."""
    if goal is None or trial.error:
        return trial
    found = reach(trial.curve, goal)
    seconds, samples = found if found else (None, None)
    return msgspec.structs.replace(trial, goal=goal, seconds_to_goal=seconds, samples_to_goal=samples)


def reach(curve: Sequence[Point], goal: float) -> tuple[float, float] | None:
    """Seconds and samples at which the curve first comes down to `goal`, on straight lines between its points."""
    for before, after in zip([curve[0], *curve], curve, strict=False):
        if after.loss <= goal:
            part = 1.0 if before.loss <= goal else (before.loss - goal) / (before.loss - after.loss)
            return (
                before.seconds + part * (after.seconds - before.seconds),
                before.samples + part * (after.samples - before.samples),
            )
    return None


# ---- tables --------------------------------------------------------------------------------------------------------

COLUMNS = (
    "way to synchronise", "R x batch", "samples/s", "s/step", "x limit", "MB up", "MB down", "s to goal", "x DDP",
    "samples", "last loss",
)  # fmt: skip


def tables(trials: Sequence[Trial], plan: Plan) -> list[Table]:
    """A table for every setting, a line for every row in it."""
    return [_table([t for t in trials if t.setting == name], plan) for name in dict.fromkeys(t.setting for t in trials)]


def _table(trials: Sequence[Trial], plan: Plan) -> Table:
    by_row: dict[tuple[str, float], list[Trial]] = {}
    for trial in trials:
        by_row.setdefault((trial.row, trial.factor), []).append(trial)
    baselines = {row: found for (row, factor), found in by_row.items() if factor == plan.factors[0]}
    model_bytes = 4 * sum(p.numel() for p in build(plan.workload, 0).parameters())
    title = (
        f"{plan.model}, {trials[0].setting}: K = {model_bytes / 1e6:.2f} MB, {plan.steps} steps of "
        f"{plan.workload.batch} samples, {plan.workload.sample_seconds * 1e3:g} ms of computing each\n"
        f"goal: the baseline's last loss x {plan.margin:g}"
        + (f" + {plan.workload.slack:g}" if plan.workload.slack else "")
        + "; samples: to the goal; MB: a worker's, a step; limit: max(computing, the busiest link)"
    )
    lines = [_line(found, baselines.get(baseline_of(plan.model, row), [])) for (row, _), found in by_row.items()]
    built = table(title, COLUMNS, lines)
    built.caption = "\n".join(f"{_name(trial)}: {trial.error}" for trial in trials if trial.error) or None
    built.caption_justify = "left"
    return built


def _line(trials: Sequence[Trial], baseline: Sequence[Trial]) -> list[str]:
    first = trials[0]
    good = [trial for trial in trials if not trial.error]
    if not good:
        return [_name(first), "no figures", *[""] * (len(COLUMNS) - 2)]
    step = statistics.median(trial.seconds for trial in good)
    seconds = [trial.seconds_to_goal for trial in good if trial.seconds_to_goal is not None]
    theirs = [trial.seconds_to_goal for trial in baseline if trial.seconds_to_goal is not None]
    samples = [trial.samples_to_goal for trial in good if trial.samples_to_goal is not None]
    hopeless = "not reached" if any(trial.goal is not None for trial in good) else ""
    missed = f" ({len(seconds)} of {len(good)})" if len(seconds) < len(good) else ""
    return [
        _name(first), f"{first.replicas} x {first.batch // first.replicas}", f"{first.batch / step:.1f}", f"{step:.3f}",
        f"{step / first.limit:.2f}", _mean_mb([t.up for t in good]), _mean_mb([t.down for t in good]),
        f"{statistics.median(seconds):.1f}{missed}" if seconds else hopeless,
        f"{statistics.median(theirs) / statistics.median(seconds):.2f}" if seconds and theirs else "",
        f"{statistics.median(samples):.0f}" if samples else "",
        f"{statistics.fmean(t.curve[-1].loss for t in good):.4f}",
    ]  # fmt: skip


def _name(trial: Trial) -> str:
    return ROWS[trial.row].title + (f", rate x {trial.factor:g}" if trial.factor != 1 else "")


def _mean_mb(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known) / 1e6:.3f}" if known else ""


def said(trial: Trial) -> str:
    """A trial in one line."""
    name = f"{trial.row}, seed {trial.seed}" + (f", rate x {trial.factor:g}" if trial.factor != 1 else "")
    if trial.error:
        return f"{name}: {trial.error}"
    when = "" if trial.goal is None else f", goal {trial.goal:.4f} " + (
        "not reached" if trial.seconds_to_goal is None else f"after {trial.seconds_to_goal:.1f} s"
    )
    return f"{name}: {trial.seconds:.3f} s a step, last loss {trial.final:.4f}{when}"


# ---- command line --------------------------------------------------------------------------------------------------


def run(settings: Sequence[Setting], plan: Plan, path: Path | None) -> None:
    """Measure, print, write; what is done when it is interrupted is printed and written too."""
    console = Console(highlight=False)
    trials: list[Trial] = []
    try:
        for setting in settings:
            run_setting(setting, plan, console, trials)
    finally:
        report(console, tables(trials, plan), trials, path)


def chosen_rows(text: str | None, quick: bool, model: str) -> tuple[str, ...]:
    """The rows asked for, each after its baseline. RallypointError names what is no row."""
    there = rows_of(model)
    names = text.split(",") if text else [name for name in there if name in QUICK or not quick]
    for name in names:
        if name not in there:
            raise RallypointError(f"there is no row {name!r} for {model}: choose from {', '.join(there)}")
    with_baselines = dict.fromkeys(each for name in names for each in (baseline_of(model, name), name))
    return tuple(with_baselines)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    model: Annotated[str, typer.Option(help="gpt (AdamW) or resnet (SGD with momentum).")] = "gpt",
    quick: Annotated[bool, typer.Option("--quick", help="A few rows at 100 Mbit/s with equal workers.")] = False,
    rows: Annotated[str | None, typer.Option(help=f"Some of {', '.join(ROWS)}; baselines come along.")] = None,
    rates: Annotated[str, typer.Option(help="Mbit/s of every link, both directions (netlab: needs root).")] = "",
    even: Annotated[bool | None, typer.Option("--even/--uneven", help="Only equal workers, or only not.")] = None,
    slow: Annotated[float, typer.Option(min=1.0, help="How many times slower the slow worker is.")] = 3.0,
    workers: Annotated[int, typer.Option(min=2, help="Workers.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Reduction servers.")] = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each row: other weights, another order.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps instead of the workload's own.")] = None,
    margin: Annotated[float, typer.Option(help="The goal is the baseline's last loss times this.")] = 1.02,
    loopback: Annotated[bool, typer.Option("--loopback", help="No links: all on this machine's loopback.")] = False,
    tune: Annotated[str | None, typer.Option(help="Factors of the rows' rates to try, on loopback.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds after which a training is given up.")] = 300.0,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
) -> None:
    """Train the same model in every way there is, on links of a known rate, and compare."""
    if model not in WORKLOADS:
        raise RallypointError(f"there is no workload {model!r}: choose from {', '.join(WORKLOADS)}")
    plan = Plan(
        model=model, rows=chosen_rows(rows, quick, model), seeds=seeds, margin=margin, patience=patience,
        steps=steps or WORKLOADS[model].steps,
    )  # fmt: skip
    links: list[float | None] = [float(rate) for rate in (rates or ("100" if quick else "100,1000")).split(",")]
    slowness = [1.0, slow] if even is None and not quick else [1.0 if even is not False else slow]
    if tune:
        own = tuple(rows.split(",")) if rows else plan.rows
        plan = dataclasses.replace(plan, rows=own, factors=tuple(map(float, tune.split(","))))
        slowness = [1.0 if even is not False else slow]
    if tune or loopback:
        links = [None]
    run([Setting(Case(workers, servers, rate), each) for rate in links for each in slowness], plan, json)


if __name__ == "__main__":
    main(app)
