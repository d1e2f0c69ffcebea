"""Is the planner right? Random jobs on links of known rates, as `core.plan` says they go and as they went.

    python benchmarks/planned.py                       # 40 cases (netlab: needs root), about half a minute each
    python benchmarks/planned.py --cases 2             # the first two
    python benchmarks/planned.py --only 7 --only 12    # these
    python benchmarks/planned.py --only 7 --into FILE  # adds case 7 to FILE, unless it is there: goes on where it ended
    python benchmarks/planned.py --show --into FILE    # all cases in FILE beside what the planner says of them now
    python benchmarks/planned.py --dry                 # what the planner says, without running anything

Each case draws a GPT, workers, servers, a link's rate, how long computing takes (blocks sleep, as if an accelerator
computed them), and a shard's size. It trains with Rallypoint and with DDP over Gloo, as `train.py` does. Cases with
an even number are there to fit the model's constants, those with an odd one are the test. Further cases, from 40 on,
can be named with `--only`.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from rich.console import Console

from cluster import Case, Place, main, report, site, table
from forked import Forking
from rallypoint.core.plan.candidates import Ring, ddp_cost
from rallypoint.core.plan.pipeline import step_cost
from rallypoint.core.plan.site import ON_CPU, Rates, Servers, Site, Workers
from rallypoint.core.plan.workload import Layer, Workload
from rallypoint.recipes.gpt_model import GPT, GPTConfig
from train import Plan, run_once
from train_member import Design

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.netlab import Host

CASES, SEED = 40, 21
TIE = 2.0  # standard errors: a measured lead below that is none, and either verdict is right
_BLOCK = 8  # bytes in a sample: next to nothing is really computed
_WARM_UP, _STEPS = 9, 6  # steps 0, 1, 2, 4, 8 of ours wait for all of a version, and the step after such a one is short
_FEWER = 3, 4  # the same of the others: DDP orders its buckets anew after the first step, and goes evenly then
_QUEUE_BYTES, _QUEUE_S = 512 * 1024, 0.010  # what `tests/support/netlab.py` lets wait at a port


class Drawn(msgspec.Struct, frozen=True):
    """One case: see the module. `wire` is K/B, `sleep` what a block sleeps in its forward pass (s), rates in Mbit/s."""

    number: int
    workers: int
    servers: int
    layers: int
    width: int
    rate: float
    wire: float
    sleep: float
    shard_kib: int

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(layers=self.layers, heads=8, width=self.width, block=_BLOCK)

    @property
    def name(self) -> str:
        ratio = 3 * self.layers * self.sleep / self.wire
        links = f"{self.workers}+{self.servers}, {self.rate:.0f} Mbit/s"
        return f"{self.number}: {links}, K/B {self.wire:.2f} s, C {ratio:.1f} K/B"


class Outcome(msgspec.Struct, frozen=True):
    """Seconds a step, measured and planned, of Rallypoint and of DDP; `compute` as measured without communication."""

    case: Drawn
    compute: float
    ours: float
    ours_planned: float
    ddp: float
    ddp_planned: float
    ours_steps: list[float] = []
    ddp_steps: list[float] = []

    @property
    def tie(self) -> bool:
        """The two medians differ by less than the steps' own scatter explains."""
        noise = math.hypot(error_of_median(self.ours_steps), error_of_median(self.ddp_steps))
        return abs(self.ddp - self.ours) < TIE * noise

    @property
    def named(self) -> bool:
        """The planner names the one whose median is smaller."""
        return (self.ddp > self.ours) == (self.ddp_planned > self.ours_planned)

    @property
    def right(self) -> bool:
        """The planner names the faster one, or it makes no difference."""
        return self.tie or self.named

    @property
    def errors(self) -> tuple[float, float]:
        """How far the planned steps are from the measured ones: 0.1 is 10 % too long."""
        return self.ours_planned / self.ours - 1, self.ddp_planned / self.ddp - 1


def error_of_median(steps: Sequence[float]) -> float:
    """The standard error of the median of so many steps (s), as of normally distributed ones; 0 of fewer than two.

    Their scatter is taken from the median distance to the median (times 1.4826), so that one odd step makes no tie.
    """
    if len(steps) < 2:
        return 0.0
    middle = statistics.median(steps)
    scatter = 1.4826 * statistics.median(abs(step - middle) for step in steps)
    return math.sqrt(math.pi / 2) * scatter / math.sqrt(len(steps))


@dataclass(frozen=True, slots=True)
class Planned:
    """What the planner says: seconds a step."""

    ours: float
    ddp: float


def draw(number: int, seed: int = SEED) -> Drawn:
    """Draw case `number`: the same one every time."""
    dice = random.Random(f"{seed}/{number}")
    workers = dice.randint(2, 4)
    servers = dice.choice([1, workers - 1, workers, workers, workers + 1])
    layers, width = dice.randint(3, 6), dice.choice([192, 256, 320])
    wire = 0.3 * 3 ** dice.random()
    words = sum(words_of(GPTConfig(layers=layers, heads=8, width=width, block=_BLOCK)))
    rate = min(200.0, max(30.0, 4 * words * 8 / wire / 1e6))
    wire = 4 * words * 8 / (rate * 1e6)
    sleep = wire * 0.1 * 25 ** dice.random() / (3 * layers)
    return Drawn(number, workers, servers, layers, width, round(rate, 1), wire, sleep, dice.choice([256, 512, 1024]))


def words_of(config: GPTConfig) -> list[int]:
    """The parameters of the model's parts, as its forward pass needs them: embeddings, then attention and MLP of each
    block. (The last norm is counted with the embeddings.)"""
    model = GPT(config)
    sizes = [sum(p.numel() for name, p in model.named_parameters() if not name.startswith("blocks."))]
    for block in model.blocks:
        named = list(block.named_parameters())
        attention = sum(p.numel() for name, p in named if "attention" in name)
        sizes += [attention, sum(p.numel() for _, p in named) - attention]
    return sizes


def workload_of(case: Drawn, compute: float) -> Workload:
    """The case for the cost model. What `compute` has beyond the blocks' sleeps is shared out by size."""
    sizes = words_of(case.model)
    more = max(0.0, compute - 3 * case.layers * case.sleep) / sum(sizes)
    asleep = [0.0, *([case.sleep / 3, case.sleep * 2 / 3] * case.layers)]
    layers = tuple(
        Layer(size, slept + size * more / 3, 2 * slept + 2 * size * more / 3)
        for size, slept in zip(sizes, asleep, strict=True)
    )
    return Workload(layers=layers, shard_bytes=case.shard_kib << 10)


def planned(case: Drawn, compute: float) -> Planned:
    """What the planner says of a case."""
    work, rate = workload_of(case, compute), case.rate * 1e6 / 8
    workers = Workers(case.workers, rate)
    there = Site(
        workers=(workers,), servers=(Servers(case.servers, rate),), queue=max(_QUEUE_BYTES, _QUEUE_S * rate)
    )  # fmt: skip
    ring = Ring.of(workers, there.speeds.latency)
    return Planned(step_cost(work, there).seconds, ddp_cost(work, workers, ring, Rates(step=ON_CPU)).seconds)


def forks(places: Sequence[Place]) -> list[Place]:
    """The same hosts; members there are forks of this process."""
    return [Forking(place) for place in places if isinstance(place, Host)]


def measure(case: Drawn, console: Console) -> Outcome:
    """Run a case with each design on the same links."""
    sets: dict[str, Any] = {"network.shard_bytes": case.shard_kib << 10, "network.pacing": "off"}
    plan = Plan(case.model, 1, 3e-4, _STEPS, _WARM_UP, 1, sets, accelerator=case.sleep)
    shorter = replace(plan, warm_up=_FEWER[0], steps=_FEWER[1])
    plans: dict[Design, Plan] = {"alone": shorter, "rallypoint": plan, "ddp": shorter}
    with site(Case(case.workers, case.servers, case.rate)) as lab:
        (coordinator,) = forks([lab.coordinator])
        at = replace(lab, coordinator=coordinator, workers=forks(lab.workers), servers=forks(lab.servers))
        steps = {design: run_once(at, how, design).steps for design, how in plans.items()}
    found = {design: statistics.median(seconds) for design, seconds in steps.items()}
    said = planned(case, found["alone"])
    outcome = Outcome(
        case, found["alone"], found["rallypoint"], said.ours, found["ddp"], said.ddp,
        steps["rallypoint"], steps["ddp"],
    )  # fmt: skip
    console.print(" | ".join(row(outcome)), style="dim")
    return outcome


COLUMNS = (
    "case", "shard KiB", "compute", "Rallypoint", "planned", "DDP", "planned", "faster", "the planner says",
)  # fmt: skip


def row(found: Outcome) -> list[str]:
    """A line of the table."""
    errors = [f"{error:+.0%}" for error in found.errors]
    faster, says = found.ddp / found.ours, found.ddp_planned / found.ours_planned
    return [
        found.case.name, str(found.case.shard_kib), f"{found.compute:.3f}", f"{found.ours:.3f}",
        f"{found.ours_planned:.3f} {errors[0]}", f"{found.ddp:.3f}", f"{found.ddp_planned:.3f} {errors[1]}",
        f"{'ours' if faster > 1 else 'DDP'} {max(faster, 1 / faster):.2f}",
        f"{'ours' if says > 1 else 'DDP'} {max(says, 1 / says):.2f}{note(found)}",
    ]  # fmt: skip


def note(found: Outcome) -> str:
    """What the table says of a verdict that is not simply right."""
    return " (a tie)" if found.tie else "" if found.named else " WRONG"


def summary(name: str, found: Sequence[Outcome]) -> str:
    """How often the planner was right, and how near."""
    if not found:
        return f"{name}: no case"
    ours, ddp = ([abs(one.errors[kind]) for one in found] for kind in (0, 1))
    return (
        f"{name}: the verdict is right in {sum(one.right for one in found)} of {len(found)} "
        f"({sum(one.tie for one in found)} of them ties); a step of ours is off by "
        f"{statistics.median(ours):.1%} in the median, {max(ours):.0%} at most, within 10 % in "
        f"{sum(error <= 0.1 for error in ours)}; one of DDP's by {statistics.median(ddp):.1%}, {max(ddp):.0%}, "
        f"{sum(error <= 0.1 for error in ddp)}"
    )


def kept(path: Path) -> list[Outcome]:
    """The cases in a file of `--into`, by number, with what the planner says of them now."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return sorted((anew(msgspec.json.decode(line, type=Outcome)) for line in lines), key=lambda one: one.case.number)


def anew(found: Outcome) -> Outcome:
    """The same measurements beside what this code's model says of the case."""
    said = planned(found.case, found.compute)
    return msgspec.structs.replace(found, ours_planned=said.ours, ddp_planned=said.ddp)


def keep(path: Path, outcome: Outcome) -> None:
    """Add a case to a file of `--into`: a line of JSON."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(outcome) + b"\n")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    cases: Annotated[int, typer.Option(min=1, help="The first so many cases.")] = CASES,
    only: Annotated[list[int] | None, typer.Option(min=0, help="Only this case; repeatable.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Only what the planner says; computing is the sleeps.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
    into: Annotated[Path | None, typer.Option(help="Add each case to this file; skip those it has.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no case after so many seconds.")] = math.inf,
    show: Annotated[bool, typer.Option("--show", help="Run nothing: only what is in the file of --into.")] = False,
) -> None:
    """Compare the planner's verdict (ours or DDP) and its step times with measured ones, on random jobs."""
    console = Console(highlight=False)
    torch.set_num_threads(1)  # before the first operation: a pool of threads does not outlive a fork
    drawn = [draw(number) for number in (only or range(cases))]
    if dry:
        for case in drawn:
            said = planned(case, 3 * case.layers * case.sleep)
            console.print(f"{case.name}: ours {said.ours:.3f}, DDP {said.ddp:.3f} ({said.ddp / said.ours:.2f})")
        return
    found = [] if into is None else kept(into)
    there, until = {one.case.number for one in found}, time.monotonic() + seconds
    for case in () if show else (case for case in drawn if case.number not in there):
        if time.monotonic() > until:
            break
        found.append(measure(case, console))
        if into is not None:
            keep(into, found[-1])
    lines = table("seconds a step, measured and planned", COLUMNS, [row(one) for one in found])
    report(console, [lines], found, json)
    console.print(summary("even cases", [one for one in found if one.case.number % 2 == 0]))
    console.print(summary("odd cases", [one for one in found if one.case.number % 2 == 1]))


if __name__ == "__main__":
    main(app)
