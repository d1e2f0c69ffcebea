"""One of four servers has half the link: a step with shards placed evenly, as told, and as measured; and what happens
when a link gets slower in the middle of a run.

    python benchmarks/uneven_links.py                          # 4 workers, 4 servers, 100 Mbit/s (needs root)
    python benchmarks/uneven_links.py --rack                   # 4 of 8 workers in a rack behind 4:1, with an aggregator
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from cluster import BenchmarkFailed, Members, Site, Spread, main, report, step_times, table
from rallypoint.core.topology.told import HostFacts, Topology
from rallypoint.testing.netlab import Host, Netlab
from reduce_member import Result, Task

EVEN, TOLD, MEASURED = "even", "told", "measured"
GOAL = 0.8  # of the best: when a placement counts as found


@dataclass(frozen=True, slots=True)
class Lab:
    """The cluster: `rate` Mbit/s of every link but the last server's, which has `slow` of that. With `racked`, half of
    the workers are in a rack with an aggregator, behind an uplink of `rate`."""

    workers: int
    servers: int
    rate: float
    slow: float
    racked: bool = False

    def limit(self, *, even: bool, aggregated: bool = False) -> float:
        """The least time of a step in units of K/B: that of the fullest link."""
        inside = self.workers // 2 if self.racked else 0
        pushed = self.workers - inside + (1 if aggregated else inside)
        share = 1 / self.servers / self.slow if even else 1 / (self.servers - 1 + self.slow)
        return max(1.0, pushed * share, 1.0 if aggregated else float(inside))


class Figures(msgspec.Struct, frozen=True):
    """What one placement took: `speed` is the ratio to the even one, `limit` the least that can be, in K/B."""

    placement: str
    seconds: Spread
    times_kb: float
    limit: float
    speed: float
    sha256: str


class Degraded(msgspec.Struct, frozen=True):
    """A link that gets slower after a version: the median step before, at best after it, and each one after it; how
    many steps (and seconds) it took until a step was within a fifth of the best."""

    measured: bool
    before: float
    best: float
    steps: int | None
    seconds: float | None
    after: list[float]
    said: list[str]
    sha256: str


@dataclass(slots=True)
class Places:
    """Where members run: `slow` is the last server's host, `aggregators` those of the rack."""

    at: Site
    slow: Host
    topology: Topology
    aggregators: Sequence[Host] = ()
    racks: list[int] | None = None
    lab: Lab = field(kw_only=True)


@contextmanager
def places(lab: Lab) -> Iterator[Places]:
    """Hosts for everybody; no link is slow yet."""
    inside = lab.workers // 2 if lab.racked else 0
    racks = [inside + 1] if inside else []
    count = lab.workers + len(racks) + lab.servers + 1
    with Netlab(count, lab.rate, racks=racks, uplink_mbit=lab.rate if racks else None) as net:
        rack, rest = net.hosts[: sum(racks)], net.hosts[sum(racks) :]
        coordinator, *others = rest
        servers, workers = others[: lab.servers], [*rack[:inside], *others[lab.servers :]]
        for host in rack[inside:]:
            host.set_rate(lab.rate * inside)
        rates = [lab.rate] * (lab.servers - 1) + [lab.rate * lab.slow]
        told = {host.address: HostFacts(link_mbit=rate) for host, rate in zip(servers, rates, strict=True)}
        numbers = [0] * inside + [1] * (lab.workers - inside) if inside else None
        yield Places(
            Site(coordinator, workers, servers, "eth0"), servers[-1], Topology(told), rack[inside:], numbers, lab=lab
        )


def run_once(
    where: Places, task: Task, placement: str, *, aggregated: bool = False, degrades_at: int = 0
) -> tuple[list[float], str, list[str]]:
    """Start all members, make the steps. Returns the seconds of each, the hash of the end, and why shards moved.

    `degrades_at`: the last server's link gets slower when a worker has this version; 0: it is slow from the start.
    """
    lab = where.lab
    where.slow.set_rate(lab.rate if degrades_at else lab.rate * lab.slow)
    with Members() as members:
        topology = where.topology if placement == TOLD else None
        members.start_rallypoint(where.at, topology=topology, measure_links=placement == MEASURED)
        members.start_aggregators(where.aggregators if aggregated else [])
        milestone = members.folder / "milestone"
        if degrades_at:
            task = msgspec.structs.replace(task, milestone=(degrades_at, str(milestone)))
        tasks = [msgspec.structs.replace(task, rank=rank) for rank in range(lab.workers)]
        members.start_workers(where.at, "reduce_member.py", tasks, where.racks)
        if degrades_at:
            members.until(milestone, 900.0)
            where.slow.set_rate(lab.rate * lab.slow)
        members.wait(900.0)
        results = members.results(where.at, Result)
        events = (members.folder / "events.jsonl").read_text().splitlines()
    texts = [str(msgspec.json.decode(line).get("text", "")) for line in events]
    said = [text for text in texts if "shards move" in text]
    if len(hashes := {result.sha256 for result in results}) != 1:
        raise BenchmarkFailed(f"workers end with different bytes: {sorted(hashes)}")
    return step_times([result.finishes for result in results], 0), hashes.pop(), said


def compared(
    console: Console, where: Places, task: Task, warm_up: int, rounds: int
) -> tuple[list[Figures], str]:
    """Even and told placement in turn; behind a rack's uplink also without its aggregator."""
    lab = where.lab
    kinds = [(EVEN, False), (EVEN, True), (TOLD, True)] if lab.racked else [(EVEN, False), (TOLD, False)]
    times: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}
    hashes: set[str] = set()
    for number in range(rounds):
        for placement, aggregated in kinds:
            taken, sha256, _ = run_once(where, task, placement, aggregated=aggregated)
            times[placement, aggregated] += taken[warm_up:]
            hashes.add(sha256)
            console.print(f"{placement}, round {number + 1}: {Spread.of(taken[warm_up:]).show()} s", style="dim")
    if len(hashes) != 1:
        raise BenchmarkFailed(f"other placements, other bytes: {sorted(hashes)}")
    ideal, even = task.words * 4 * 8 / (lab.rate * 1e6), median(times[kinds[0]])
    return [
        Figures(
            placement=f"{placement}{', aggregator' if aggregated else ''}", seconds=(found := Spread.of(taken)),
            times_kb=found.median / ideal, limit=lab.limit(even=placement == EVEN, aggregated=aggregated),
            speed=even / found.median, sha256=min(hashes),
        )
        for (placement, aggregated), taken in times.items()
    ], min(hashes)  # fmt: skip


def degraded(where: Places, task: Task, at: int, best: float, *, measured: bool) -> Degraded:
    """A run of `task` in which the last server's link gets slower at that version; `best`: a step placed as told."""
    taken, sha256, said = run_once(where, task, MEASURED if measured else EVEN, degrades_at=at)
    before, after = taken[:at], taken[at:]
    good = [index for index in range(1, len(after) - 2) if median(after[index : index + 3]) <= best / GOAL]
    steps = good[0] if good else None
    return Degraded(
        measured, median(before[1:]), best, steps, None if steps is None else sum(after[:steps]), after, said, sha256
    )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 4,
    servers: Annotated[int, typer.Option(min=2, help="Servers.")] = 4,
    rate: Annotated[float, typer.Option(help="Mbit/s of every link but one.")] = 100.0,
    slow: Annotated[float, typer.Option(help="What part of that the last server's link has.")] = 0.5,
    megabytes: Annotated[float, typer.Option(min=0.01, help="K, in 10^6 bytes.")] = 10.0,
    shard_kib: Annotated[int, typer.Option(min=1, help="Shards, in KiB.")] = 128,
    steps: Annotated[int, typer.Option(min=2, help="Steps measured in a round.")] = 6,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before those.")] = 3,
    after: Annotated[int, typer.Option(min=0, help="Steps after a link got slower; 0: not measured.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each one every placement once.")] = 3,
    rack: Annotated[bool, typer.Option("--rack", help="Twice the workers, half of them in a rack.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
) -> None:
    """Time a step of synchronous training on servers whose links are not alike.

    All replicas have different weights; the bytes at the end must be the same whatever the placement.
    """
    console = Console(highlight=False)
    lab = Lab(2 * workers if rack else workers, servers, rate, slow, rack)
    task = Task(
        design="rallypoint", rank=0, workers=lab.workers, words=int(megabytes * 1e6 / 4), steps=steps + warm_up,
        shard_bytes=shard_kib * 1024, window=4, hold_bytes=64 << 20, in_flight_bytes=0, weighted=True,
    )  # fmt: skip
    late: list[Degraded] = []
    with places(lab) as where:
        found, _ = compared(console, where, task, warm_up, rounds)
        if after and not rack:
            at, best = warm_up + steps, found[-1].seconds.median
            longer = msgspec.structs.replace(task, steps=at + after)
            for number in range(rounds):
                late += [degraded(where, longer, at, best, measured=measured) for measured in (False, True)]
                if len({one.sha256 for one in late}) != 1:
                    raise BenchmarkFailed("shards that move change the bytes")
                console.print(f"degraded, round {number + 1}: {late[-1].steps} steps; {late[-1].said}", style="dim")
    rows = [
        [f.placement, f.sha256[:12], f.seconds.show(), f"{f.times_kb:.2f}", f"{f.limit:.2f}", f"{f.speed:.2f}"]
        for f in found
    ]
    title = (
        f"one step of K = {megabytes:g} MB: {lab.workers} workers, {servers} servers, links of {rate:g} Mbit/s, "
        f"that of one server {rate * slow:g}"
    )
    columns = ("placement", "sha256", "seconds [min..max]", "x K/B", "limit x K/B", "speed/even")
    shown = [table(title, columns, [*rows])]
    if late:
        title = f"that link gets slower in the middle of a run of {at + after} steps: until within a fifth of the best"
        rows = [
            [
                "measured" if one.measured else "even", one.sha256[:12], f"{one.before:.3f}", f"{one.best:.3f}",
                "never" if one.steps is None else f"{one.steps}", f"{median(one.after[-8:]):.3f}",
                f"{max(one.after):.3f}",
            ]
            for one in late
        ]  # fmt: skip
        names = ("placement", "sha256", "s before", "s at best", "steps until", "s in the end", "s the longest")
        shown.append(table(title, names, rows))
    report(console, shown, {"placements": found, "degraded": late}, json)


if __name__ == "__main__":
    main(app)
