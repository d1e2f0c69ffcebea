"""What aggregators spare an uplink: two racks of workers, servers behind a narrow link, with and without aggregators.

    python benchmarks/racks.py                                             # 2 racks of 4, 4:1, 100 Mbit/s (needs root)
    python benchmarks/racks.py --rate 200 --megabytes 20 --steps 10
    python benchmarks/racks.py --kill                                      # and once with an aggregator killed mid-step
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from cluster import BenchmarkFailed, Members, Site, Spread, main, report, step_times, table
from reduce_member import Result, Task

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.netlab import Host, Netlab

NAMES = {False: "flat", True: "aggregators"}


@dataclass(frozen=True, slots=True)
class Layout:
    """The cluster: `rate` Mbit/s of every host's link and of every rack's uplink. (An aggregator's link has as many
    times that as its rack has workers.)"""

    racks: int
    workers: int
    servers: int
    rate: float

    @property
    def everybody(self) -> int:
        """All workers."""
        return self.racks * self.workers

    @property
    def rack_of(self) -> list[int]:
        """Each worker's rack."""
        return [rack for rack in range(self.racks) for _ in range(self.workers)]

    def limit(self, *, aggregated: bool) -> float:
        """The least time of a step in units of K/B, whatever carries the bytes: that of the fullest link."""
        pushed = self.racks if aggregated else self.everybody
        return max(1.0, pushed / self.servers, 1.0 if aggregated else float(self.workers))


@dataclass(frozen=True, slots=True)
class Kill:
    """The first rack's aggregator is killed so many seconds after a worker has `version`."""

    version: int
    seconds: float


class Killed(msgspec.Struct, frozen=True):
    """Seconds of the steps before an aggregator was killed, of the step in which it was, and of those after it, when
    its workers go to the servers directly."""

    before: Spread
    step: float
    after: Spread
    sha256: str


class Figures(msgspec.Struct, frozen=True):
    """What one layout took. `times_kb` is seconds / (K/B), `limit` the least that can be, `speed` the ratio to flat."""

    design: str
    seconds: Spread
    times_kb: float
    limit: float
    speed: float
    sha256: str


@contextmanager
def lab(layout: Layout) -> Iterator[tuple[Site, list[Host]]]:
    """The hosts: each rack's workers and its aggregator's, the servers and the coordinator outside."""
    size = layout.workers + 1
    count = layout.racks * size + layout.servers + 1
    with Netlab(count, layout.rate, racks=[size] * layout.racks, uplink_mbit=layout.rate) as net:
        racks = [net.hosts[rack * size : (rack + 1) * size] for rack in range(layout.racks)]
        coordinator, *servers = net.hosts[layout.racks * size :]
        aggregators = [rack[-1] for rack in racks]
        for host in aggregators:
            host.set_rate(layout.rate * layout.workers)
        yield Site(coordinator, [host for rack in racks for host in rack[:-1]], servers, "eth0"), aggregators


def run_once(
    at: Site, places: Sequence[Host], layout: Layout, task: Task, warm_up: int, *, kills: Kill | None = None
) -> tuple[list[float], str]:
    """Start all members, make the steps: seconds of each one after the warm-up, and the hash of the end."""
    with Members() as members:
        members.start_rallypoint(at)
        members.start_aggregators(places)
        milestone = members.folder / "milestone"
        if kills is not None:
            task = msgspec.structs.replace(task, milestone=(kills.version, str(milestone)))
        tasks = [msgspec.structs.replace(task, rank=rank) for rank in range(layout.everybody)]
        members.start_workers(at, "reduce_member.py", tasks, layout.rack_of)
        if kills is not None:
            members.until(milestone, 900.0)
            time.sleep(kills.seconds)
            members.kill("aggregator0")
        members.wait(900.0)
        results = members.results(at, Result)
    if len(hashes := {result.sha256 for result in results}) != 1:
        raise BenchmarkFailed(f"workers end with different bytes: {sorted(hashes)}")
    return step_times([result.finishes for result in results], warm_up), hashes.pop()


def run_killed(at: Site, places: Sequence[Host], layout: Layout, task: Task, warm_up: int, step: float) -> Killed:
    """As many steps as ever, half of them before the kill, which is in the middle of a step of `step` seconds."""
    middle = (task.steps - warm_up) // 2
    kills = Kill(warm_up + middle, step / 2)
    taken, sha256 = run_once(at, places, layout, task, warm_up, kills=kills)
    return Killed(Spread.of(taken[:middle]), taken[middle], Spread.of(taken[middle + 1 :]), sha256)


def run(layout: Layout, task: Task, warm_up: int, rounds: int, path: Path | None, *, kill: bool = False) -> None:
    """Measure both in turn, print, write. `kill`: and once more with an aggregator killed in the middle of a step."""
    console = Console(highlight=False)
    times: dict[bool, list[float]] = {False: [], True: []}
    hashes: dict[bool, str] = {}
    with lab(layout) as (at, aggregators):
        for number in range(rounds):
            for aggregated in times:
                places = aggregators if aggregated else []
                taken, hashes[aggregated] = run_once(at, places, layout, task, warm_up)
                times[aggregated] += taken
                console.print(f"{NAMES[aggregated]}, round {number + 1}: {Spread.of(taken).show()} s", style="dim")
        if kill:
            killed = run_killed(at, aggregators, layout, task, warm_up, Spread.of(times[True]).median)
            console.print(
                f"an aggregator killed: {killed.before.show()} s a step before, {killed.step:.3f} s the step in which "
                f"it was, {killed.after.show()} s after it; sha256 {killed.sha256[:12]}"
            )
            if killed.sha256 != hashes[False]:
                raise BenchmarkFailed("with an aggregator killed the bytes are others")
    if hashes[True] != hashes[False]:
        raise BenchmarkFailed(f"with aggregators the bytes are others: {hashes}")
    ideal, flat = task.words * 4 * 8 / (layout.rate * 1e6), Spread.of(times[False])
    found = [
        Figures(
            design=NAMES[aggregated], seconds=(seconds := Spread.of(times[aggregated])),
            times_kb=seconds.median / ideal, limit=layout.limit(aggregated=aggregated),
            speed=flat.median / seconds.median, sha256=hashes[aggregated],
        )
        for aggregated in times
    ]  # fmt: skip
    rows = [
        [f.design, f.sha256[:12], f.seconds.show(), f"{f.times_kb:.2f}", f"{f.limit:.2f}", f"{f.speed:.2f}"]
        for f in found
    ]
    title = (
        f"one step of K = {task.words * 4 / 1e6:g} MB: {layout.racks} racks of {layout.workers} workers, "
        f"{layout.servers} servers outside; links and uplinks of {layout.rate:g} Mbit/s ({layout.workers}:1)"
    )
    columns = ("layout", "sha256", "seconds [min..max]", "x K/B", "limit x K/B", "speed/flat")
    report(console, [table(title, columns, rows)], found, path)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    racks: Annotated[int, typer.Option(min=1, help="Racks.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Workers in each rack.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Servers outside the racks.")] = 4,
    rate: Annotated[float, typer.Option(help="Mbit/s of every link and of every uplink.")] = 100.0,
    megabytes: Annotated[float, typer.Option(min=0.01, help="K, in 10^6 bytes.")] = 10.0,
    shard_kib: Annotated[int, typer.Option(min=1, help="Shards, in KiB.")] = 256,
    steps: Annotated[int, typer.Option(min=4, help="Steps measured in a round.")] = 6,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before those; workers take up their route in them.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each one both layouts, one after the other.")] = 2,
    kill: Annotated[bool, typer.Option("--kill", help="Once more, with an aggregator killed mid-step.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
) -> None:
    """Time a step of synchronous training in racks behind narrow uplinks, flat and with an aggregator in each rack.

    Every member has a host of its own. An uplink is as fast as one worker's link, so that all workers of a rack share
    what one could use. All replicas have different weights; the bytes at the end must be the same.
    """
    task = Task(
        design="rallypoint", rank=0, workers=racks * workers, words=int(megabytes * 1e6 / 4), steps=steps + warm_up,
        shard_bytes=shard_kib * 1024, window=4, hold_bytes=64 << 20, in_flight_bytes=0, weighted=True,
    )  # fmt: skip
    run(Layout(racks, workers, servers, rate), task, warm_up, rounds, json, kill=kill)


if __name__ == "__main__":
    main(app)
