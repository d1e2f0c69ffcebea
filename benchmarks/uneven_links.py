"""One of four servers has half the link, or a rack has a narrow uplink: a step with shards placed evenly, as told, and
as measured; and what happens when a link gets slower in the middle of a run.

    python benchmarks/uneven_links.py                          # 4 workers, 4 servers, 100 Mbit/s (needs root)
    python benchmarks/uneven_links.py --rack                   # and 1 worker, 3 servers in a rack behind 4:1
    python benchmarks/uneven_links.py --rack --inside 4        # 4 workers there: also with an aggregator for them
"""

from __future__ import annotations

import sys
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
from rallypoint.core.placing.uplinks import Rack, duration, shares
from rallypoint.core.plan.topology import HostFacts, RackFacts, Topology
from reduce_member import Result, Task

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.netlab import Host, Netlab

EVEN, TOLD, MEASURED = "even", "told", "measured"
RACK = "rack0"  # as `Members.start_workers` calls it
GOAL = 0.8  # of the best: when a placement counts as found


@dataclass(frozen=True, slots=True)
class Lab:
    """The cluster: `rate` Mbit/s of every link but the last server's, which has `slow` of that. With `racked`, so many
    of the servers and `inside` workers are in a rack behind an uplink of `rate`, and no server is slow."""

    workers: int
    servers: int
    rate: float
    slow: float
    inside: int = 0
    racked: int = 0

    def limit(self, *, even: bool, aggregated: bool = False) -> float:
        """The least time of a step in units of K/B: that of the fullest link."""
        if not self.racked:
            share = 1 / self.servers / self.slow if even else 1 / (self.servers - 1 + self.slow)
            return max(1.0, self.workers * share)
        racks = {
            RACK: Rack(1 if aggregated else self.inside, self.rate * self.racked, self.rate),
            "rest": Rack(self.workers - self.inside, self.rate * (self.servers - self.racked)),
        }
        placed = {RACK: self.racked / self.servers, "rest": 1 - self.racked / self.servers} if even else shares(racks)
        return max(1.0, duration(racks, placed) * self.rate)


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
    slow: Host | None
    topology: Topology
    aggregators: Sequence[Host] = ()
    racks: list[int] | None = None
    lab: Lab = field(kw_only=True)


@contextmanager
def places(lab: Lab) -> Iterator[Places]:
    """Hosts for everybody; no link is slow yet."""
    if lab.racked:
        with racked_places(lab) as found:
            yield found
        return
    with Netlab(lab.workers + lab.servers + 1, lab.rate) as net:
        coordinator, *others = net.hosts
        servers, workers = others[: lab.servers], others[lab.servers :]
        rates = [lab.rate] * (lab.servers - 1) + [lab.rate * lab.slow]
        told = {host.address: HostFacts(link_mbit=rate) for host, rate in zip(servers, rates, strict=True)}
        yield Places(Site(coordinator, workers, servers, "eth0"), servers[-1], Topology(told), lab=lab)


@contextmanager
def racked_places(lab: Lab) -> Iterator[Places]:
    """A rack with some workers and servers (and an aggregator's host, if it has several workers); the rest outside."""
    merges = lab.inside > 1
    size = lab.inside + lab.racked + merges
    count = lab.workers + lab.servers + merges + 1
    with Netlab(count, lab.rate, racks=[size], uplink_mbit=lab.rate) as net:
        rack, (coordinator, *rest) = net.hosts[:size], net.hosts[size:]
        within, aggregators = rack[: lab.inside], rack[lab.inside + lab.racked :]
        for host in aggregators:
            host.set_rate(lab.rate * lab.inside)
        outside = lab.workers - lab.inside
        workers, own = [*within, *rest[:outside]], rack[lab.inside : lab.inside + lab.racked]
        told = {host.address: HostFacts("rack1", lab.rate) for host in rest[outside:]}
        told |= {host.address: HostFacts(RACK, lab.rate) for host in own}
        site = Site(coordinator, workers, [*rest[outside:], *own], "eth0")
        topology = Topology(told, {RACK: RackFacts(lab.rate)})
        yield Places(site, None, topology, aggregators, [0] * lab.inside + [1] * outside, lab=lab)


def run_once(
    where: Places, task: Task, placement: str, *, aggregated: bool = False, degrades_at: int = 0
) -> tuple[list[float], str, list[str]]:
    """Start all members, make the steps. Returns the seconds of each, the hash of the end, and why shards moved.

    `degrades_at`: the last server's link gets slower when a worker has this version; 0: it is slow from the start.
    """
    lab = where.lab
    if where.slow is not None:
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
        if degrades_at and where.slow is not None:
            members.until(milestone, 900.0)
            where.slow.set_rate(lab.rate * lab.slow)
        members.wait(900.0)
        results = members.results(where.at, Result)
        said = members.sentences("shards move", "uplink")
    if len(hashes := {result.sha256 for result in results}) != 1:
        raise BenchmarkFailed(f"workers end with different bytes: {sorted(hashes)}")
    return step_times([result.finishes for result in results], 0), hashes.pop(), said


def compared(
    console: Console, where: Places, task: Task, warm_up: int, rounds: int
) -> tuple[list[Figures], str]:
    """Even and told placement in turn; where a rack has several workers, with an aggregator too."""
    lab = where.lab
    merges = (False, True) if where.aggregators else (False,)
    kinds = [(placement, merged) for merged in merges for placement in (EVEN, TOLD)]
    times: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}
    hashes: set[str] = set()
    for number in range(rounds):
        for placement, aggregated in kinds:
            taken, sha256, said = run_once(where, task, placement, aggregated=aggregated)
            times[placement, aggregated] += taken[warm_up:]
            hashes.add(sha256)
            shown = Spread.of(taken[warm_up:]).show()
            console.print(f"{placement}, round {number + 1}: {shown} s; {said}", style="dim", soft_wrap=True)
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
    rack: Annotated[bool, typer.Option("--rack", help="Some more in a rack behind an uplink of this rate.")] = False,
    inside: Annotated[int, typer.Option(min=0, help="Workers in the rack.")] = 1,
    inside_servers: Annotated[int, typer.Option(min=1, help="Servers in the rack.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
) -> None:
    """Time a step of synchronous training on servers whose links are not alike.

    All replicas have different weights; the bytes at the end must be the same whatever the placement.
    """
    console = Console(highlight=False)
    lab = Lab(workers, servers, rate, slow)
    if rack:
        lab = Lab(workers + inside, servers + inside_servers, rate, 1.0, inside, inside_servers)
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
    about = (
        f"{inside} and {inside_servers} of them in a rack whose uplink has {rate:g}" if rack
        else f"that of one server {rate * slow:g}"
    )  # fmt: skip
    title = (
        f"one step of K = {megabytes:g} MB: {lab.workers} workers, {lab.servers} servers, links of {rate:g} Mbit/s, "
        f"{about}"
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
