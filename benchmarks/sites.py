"""Training across data centres: three sites, 100 Mbit/s and 50 ms between them. What a mode gets done, and a site lost.

    sudo python benchmarks/sites.py --rows sync,streaming --json sites.json
    sudo python benchmarks/sites.py --rows streaming --lose 12          # a site is cut off for 12 s

Each site has a worker and a server (with `--replication 2` every shard is at two sites); the coordinator is at site 0.
Within a site links are not limited. Each site's uplink is, and everything that takes it arrives 25 ms later, so 50 ms
from site to site (100 ms there and back), by `tests/support/netlab.py`.

The fair figure is the time to Sync's last loss: local steps need more of them for the same loss, and get more.
Computing a step is padded to the same length everywhere by sleeping (see strategies_workloads.py): three workers share
two cores.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

import rallypoint as rp
from cluster import BenchmarkFailed, Members, Site, main, report, table
from rallypoint.codec.spec import Int8
from rallypoint.recipes.gpt_model import GPT
from sites_member import Result, Task, shape
from strategies import Point, reach

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.netlab import Netlab

_ROWS = "sync,streaming"
SITES, BATCH = 3, 4
_OUTER = rp.SGD(lr=0.7, momentum=0.5, nesterov=True)
_POLL_S, _PATIENCE_S = 0.02, 600.0
_SETTINGS: Mapping[str, Any] = {
    "replicas": SITES, "batch": BATCH, "clip": 1.0, "network.shard_bytes": 256 << 10, "seed": 1
}


@dataclass(frozen=True, slots=True)
class Row:
    """A way to synchronise. It makes `longer` times as many steps as Sync; each takes `copies` times K up and down."""

    title: str
    longer: float = 1.0
    copies: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)


_INT8 = {"codec": Int8(), "down": Int8()}
ROWS: Mapping[str, Row] = {
    "sync": Row("Sync"),
    "sync-int8": Row("Sync, int8 both ways", copies=0.254, settings=_INT8),
    "local": Row("LocalSteps(16)", 3.0, 1 / 16, {"sync": rp.LocalSteps(16, outer=_OUTER)}),
    "streaming": Row(
        "LocalSteps(16, fragments=4, delay=3), int8 both ways", 3.0, 0.254 / 16,
        {"sync": rp.LocalSteps(16, outer=_OUTER, fragments=4, delay=3), **_INT8},
    ),
}  # fmt: skip


class Loss(msgspec.Struct, frozen=True):
    """The `site` that was cut off: for how long, the longest pause of the others between two steps before, while it was
    away and after that, and when (seconds after the link came back) it began a step again; None: it has not."""

    site: int
    away: float
    pause_before: float
    pause_away: float
    pause_after: float
    back: float | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `limit` is the least that a step can take, `crossed` bytes out of all sites, `goal` seconds to Sync's
    last loss (None: not reached, or no Sync in this run), `pause` the longest one of any site."""

    row: str
    steps: int
    seconds: float
    limit: float
    loss: float
    crossed: int
    pause: float
    goal: float | None = None
    lost: Loss | None = None
    computing: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    steps: int
    width: int
    layers: int
    seconds: float
    rate: float
    delay: float
    replication: int
    heartbeat: float
    lose: float
    site: int
    idle_windows: bool

    @property
    def words(self) -> int:
        """The parameters."""
        return sum(p.numel() for p in GPT(shape(self.width, self.layers)).parameters())

    def limit(self, row: Row) -> float:
        """Seconds of a step: computing, or what an uplink carries (its worker's and its server's part), if longer.

        With a server at each site a worker sends two thirds to other sites, a server a third to two workers, and with
        two copies a third, raw, to a backup.
        """
        raw = 4.0 * self.words
        rounds = 1 / 16 if row.longer > 1 else 1.0
        sent = raw * (4 / 3 * row.copies + (1 / 3 * rounds if self.replication > 1 else 0.0))
        return max(self.seconds, sent * 8 / (self.rate * 1e6))


@contextmanager
def lab(plan: Plan) -> Iterator[tuple[Netlab, Site]]:
    """Three sites: a worker's and a server's host each, the coordinator's at site 0."""
    racks = (3, 2, 2)
    with Netlab(sum(racks), racks=racks, uplink_mbit=plan.rate, uplink_delay=plan.delay / 2) as net:
        if not plan.idle_windows:
            for host in net.hosts:
                host.run(["sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"], timeout=10)
        sites = [net.rack(number) for number in range(SITES)]
        yield net, Site(sites[0][-1], [site[0] for site in sites], [site[1] for site in sites], "eth0")


class Notes:
    """What workers have noted."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{rank}.steps" for rank in range(SITES)]

    def begun(self, site: int) -> list[tuple[float, int]]:
        """(when, which step) of each step of this site."""
        if not self.paths[site].exists():
            return []
        lines = self.paths[site].read_text().splitlines(keepends=True)
        return [(float(when), int(step)) for when, step, _ in (line.split() for line in lines if line.endswith("\n"))]

    def pause(self, sites: Sequence[int], first: float = 0.0, last: float = float("inf")) -> float:
        """The longest time in which one of these sites began no step, between these two moments."""
        longest = 0.0
        for site in sites:
            times = [when for when, _ in self.begun(site) if first <= when <= last]
            longest = max([longest, *(after - before for before, after in itertools.pairwise(times))])
        return longest


def run_once(plan: Plan, name: str) -> tuple[Figures, list[Result]]:
    """One training; its `goal` is not yet known."""
    row = ROWS[name]
    steps = round(plan.steps * row.longer) // 16 * 16
    with lab(plan) as (net, at), Members() as members:
        notes = Notes(members.folder)
        members.start_rallypoint(at, replication=plan.replication, heartbeat=plan.heartbeat)
        settings = {**_SETTINGS, **row.settings, "steps": steps}
        settings["optimizer"] = rp.AdamW(
            lr=rp.cosine(1e-3, warmup=max(1, steps // 10)), betas=(0.9, 0.95), weight_decay=0.1
        )
        told = {key: msgspec.to_builtins(value) for key, value in settings.items()}
        members.start_workers(at, "sites_member.py", [
            Task(rank, plan.width, plan.layers, told, plan.seconds, 16 if row.longer > 1 else 4, str(notes.paths[rank]))
            for rank in range(SITES)
        ])  # fmt: skip
        members.until(notes.paths[0], _PATIENCE_S)
        before = sum(net.uplink_bytes(number)[0] for number in range(SITES))
        lost = _lose(net, notes, members, steps, plan) if plan.lose else None
        members.wait(_PATIENCE_S)
        crossed = sum(net.uplink_bytes(number)[0] for number in range(SITES)) - before
        results = members.results(at, Result)
        began, ended = min(result.began for result in results), max(result.ended for result in results)
        figures = Figures(
            row=name, steps=steps, seconds=ended - began, limit=plan.limit(row), loss=results[0].curve[-1].loss,
            crossed=crossed, pause=notes.pause(range(SITES)), computing=results[0].computing,
            lost=_found(plan.site, lost, notes) if lost else None,
        )  # fmt: skip
    return figures, results


def _lose(net: Netlab, notes: Notes, members: Members, steps: int, plan: Plan) -> tuple[float, float]:
    """Cut a site off at a third of the steps, for a while. Returns when, and when the link was back."""
    _until(notes, members, steps // 3)
    cut = time.monotonic()
    net.cut_rack(plan.site)
    time.sleep(plan.lose)
    healed = time.monotonic()
    net.heal_rack(plan.site)
    return cut, healed


def _until(notes: Notes, members: Members, step: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while max((step for _, step in notes.begun(0)), default=-1) < step:
        members.check()
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"step {step} was not reached after {_PATIENCE_S:.0f} s")
        time.sleep(_POLL_S)


def _found(lost: int, times: tuple[float, float], notes: Notes) -> Loss:
    cut, healed = times
    others = [site for site in range(SITES) if site != lost]
    again = [when for when, _ in notes.begun(lost) if when > healed]
    back = min(again) - healed if again else None
    away, after = notes.pause(others, cut - 1.0, healed), notes.pause(others, healed - 1.0)
    return Loss(lost, healed - cut, notes.pause(others, 0.0, cut), away, after, back)


def with_goal(figures: Figures, results: Sequence[Result], goal: float | None) -> Figures:
    """The figures with the seconds until this loss."""
    if goal is None:
        return figures
    began = min(result.began for result in results)
    curve = [Point(max(0.0, point.at - began), 0, point.loss) for point in results[0].curve]
    found = reach(curve, goal)
    return msgspec.structs.replace(figures, goal=found[0] if found else None)


def run(plan: Plan, names: Sequence[str], path: Path | None) -> None:
    """Each row once, one after the other; print, write."""
    console, found, goal = Console(highlight=False), list[Figures](), None
    try:
        for name in names:
            figures, results = run_once(plan, name)
            if name == "sync":
                goal = figures.loss
            found.append(with_goal(figures, results, goal))
            console.print(str(found[-1]), style="dim", soft_wrap=True)
    finally:
        if found:
            report(console, [_table(plan, found), *_lost_table(found)], found, path)


def _table(plan: Plan, found: Sequence[Figures]) -> Any:
    sync = next((figures for figures in found if figures.row == "sync"), None)
    rows = [
        [
            ROWS[f.row].title, f"{f.steps}", f"{f.seconds:.1f}", f"{f.seconds / f.steps:.3f}", f"{f.limit:.3f}",
            f"{f.crossed / 1e6 / f.steps:.2f}", f"{f.loss:.4f}", "" if f.goal is None else f"{f.goal:.1f}",
            f"{sync.goal / f.goal:.1f}" if sync and sync.goal and f.goal else "", f"{f.pause:.2f}",
        ]
        for f in found
    ]  # fmt: skip
    title = (
        f"three sites, {plan.rate:g} Mbit/s and {plan.delay * 1e3:g} ms between them, a worker and a server at each, "
        f"replication {plan.replication}; K = {plan.words * 4 / 1e6:.1f} MB, computing {plan.seconds:g} s a step"
    )
    columns = (
        "way to synchronise", "steps", "seconds", "s/step", "limit", "MB between sites/step", "last loss",
        "s to Sync's loss", "x Sync", "longest pause",
    )  # fmt: skip
    return table(title, columns, rows)


def _lost_table(found: Sequence[Figures]) -> list[Any]:
    rows = [
        [
            ROWS[f.row].title, f"site {f.lost.site}", f"{f.lost.away:.1f}", f"{f.lost.pause_before:.2f}",
            f"{f.lost.pause_away:.2f}", f"{f.lost.pause_after:.2f}",
            "not" if f.lost.back is None else f"{f.lost.back:.1f}",
        ]
        for f in found if f.lost
    ]  # fmt: skip
    columns = (
        "way to synchronise", "cut off", "for s", "others' longest pause: before", "meanwhile", "after", "back, s",
    )  # fmt: skip
    return [table("a site is cut off, and comes back", columns, rows)] if rows else []


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    rows: Annotated[str, typer.Option(help=f"Of {', '.join(ROWS)}; sync first gives the goal.")] = _ROWS,
    steps: Annotated[int, typer.Option(min=16, help="Sync's steps; local steps make three times as many.")] = 64,
    width: Annotated[int, typer.Option(help="The GPT's width.")] = 256,
    layers: Annotated[int, typer.Option(help="The GPT's layers.")] = 3,
    seconds: Annotated[float, typer.Option(help="Computing of a step, padded by sleeping.")] = 0.12,
    rate: Annotated[float, typer.Option(help="Mbit/s of each site's uplink.")] = 100.0,
    delay: Annotated[float, typer.Option(help="Seconds from site to site, one way.")] = 0.05,
    replication: Annotated[int, typer.Option(min=1, max=2, help="Sites that hold each shard.")] = 2,
    heartbeat: Annotated[float, typer.Option(help="Seconds of silence after which a member is given up.")] = 1.0,
    lose: Annotated[float, typer.Option(help="Cut a site off for so many seconds, at a third of the steps.")] = 0.0,
    site: Annotated[int, typer.Option(min=0, max=2, help="Which one; site 0 has the coordinator.")] = 2,
    idle_windows: Annotated[bool, typer.Option("--idle-windows", help="TCP starts slowly after idling.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
) -> None:
    """Train across three sites in several ways; cut one off if asked for."""
    plan = Plan(steps, width, layers, seconds, rate, delay, replication, heartbeat, lose, site, idle_windows)
    names = rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise BenchmarkFailed(f"there is no row {unknown[0]!r}: choose from {', '.join(ROWS)}")
    run(plan, names, json)


if __name__ == "__main__":
    main(app)
