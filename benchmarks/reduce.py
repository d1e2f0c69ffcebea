"""How long one synchronisation takes: Rallypoint's servers against Gloo's all-reduce, on links of a known rate.

    python benchmarks/reduce.py --goals                                    # the three cases of the project's goals
    python benchmarks/reduce.py --workers 4 --servers 4 --rate 1000        # one case, 1 Gbit/s links
    python benchmarks/reduce.py --loopback --workers 2 --servers 1         # plain loopback, no root needed
    python benchmarks/reduce.py --tls                                      # with TLS and without, in turn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import typer
from rich.console import Console

from cluster import TCP_LIMIT, TUNING, Case, Members, Site, Spread, main, report, site, step_times, table
from rallypoint.config import JobConfig
from reduce_member import Optimizer, Result, Task

Design = Literal["rallypoint", "tls", "gloo", "gloo-step"]
NAMES: dict[Design, str] = {
    "rallypoint": "Rallypoint", "tls": "Rallypoint, TLS", "gloo": "Gloo all-reduce",
    "gloo-step": "Gloo, then each worker steps",
}  # fmt: skip
_DEFAULTS = JobConfig()

# The three cases of the project's goals, each with the settings that suit its links: on slow ones small shards, so that
# less of the first and the last shard travels alone, no credit out of turn, so that no flow runs far ahead, and with
# many members a limit to what is in flight, so that they do not overrun each other's ports.
GOALS: tuple[tuple[Case, dict[str, Any]], ...] = (
    (Case(4, 4, 1000.0), {"shard_bytes": 512 << 10, "window": 8, "hold_bytes": 0}),
    (
        Case(8, 8, 200.0),
        {
            "shard_bytes": 384 << 10, "window": 2, "hold_bytes": 0,
            "in_flight_bytes": 256 << 10
        }
    ),
    (Case(2, 1, None), {"shard_bytes": 4 << 20}),  # what a job on one host takes by itself
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much, how often, cut how."""

    words: int
    steps: int
    warm_up: int
    rounds: int
    shard_bytes: int
    window: int
    hold_bytes: int
    in_flight_bytes: int
    pace_mbit: float = 0.0
    pacing: Literal["auto", "off"] = "auto"
    tune: Literal["off", "auto"] = "off"
    optimizer: Optimizer = "sgd"

    @property
    def nbytes(self) -> int:
        """K."""
        return 4 * self.words


class Figures(msgspec.Struct, frozen=True):
    """What one design took in one case.

    `times_kb` is seconds / (K/B), `limit` the least that can be; `speed` the ratio to Gloo; `rate` GB/s of gradient.
    """

    case: str
    design: Design
    seconds: Spread
    times_kb: float | None
    limit: float
    speed: float
    rate: float
    all_seconds: list[float]


def limit(case: Case, design: Design) -> float:
    """The least time of a synchronisation in units of K/B, whatever carries the bytes."""
    if design.startswith("gloo"):
        return 2 * (case.workers - 1) / case.workers
    return max(1.0, case.workers / case.servers)


def measure(case: Case, size: Size, designs: Sequence[Design], console: Console) -> list[Figures]:
    """The designs in turn, `rounds` times, on the same links."""
    times: dict[Design, list[float]] = {design: [] for design in designs}
    with site(case) as at:
        for number in range(size.rounds):
            for design in designs:
                taken = run_once(at, size, design)
                times[design] += taken
                console.print(f"{case.name}: {design}, round {number + 1}: {Spread.of(taken).show()} s", style="dim")
    return [figures(case, size, design, times) for design in designs]


def run_once(at: Site, size: Size, design: Design) -> list[float]:
    """Start all members, synchronise `steps` times, end them: seconds of each step after the warm-up."""
    tasks = [
        Task(
            design="rallypoint" if design == "tls" else design, rank=rank, workers=len(at.workers),
            words=size.words, steps=size.steps + size.warm_up, shard_bytes=size.shard_bytes, window=size.window,
            hold_bytes=size.hold_bytes, in_flight_bytes=size.in_flight_bytes,
            pace_mbit=size.pace_mbit, pacing=size.pacing, tune=size.tune, optimizer=size.optimizer,
        )
        for rank in range(len(at.workers))
    ]  # fmt: skip
    with Members(tls=design == "tls") as members:
        if not design.startswith("gloo"):
            members.start_rallypoint(at)
        members.start_workers(at, "reduce_member.py", tasks)
        members.wait(600.0)
        if not design.startswith("gloo") and size.tune == "auto":
            print(*members.sentences(*TUNING), sep="\n")
        return step_times([result.finishes for result in members.results(at, Result)], size.warm_up)


def figures(case: Case, size: Size, design: Design, times: dict[Design, list[float]]) -> Figures:
    """The figures of one design beside the other's."""
    seconds, peer = Spread.of(times[design]), Spread.of(times.get("gloo") or times[design])
    ideal = case.wire_seconds(size.nbytes)
    return Figures(
        case=case.name, design=design, seconds=seconds, times_kb=seconds.median / ideal if ideal else None,
        limit=limit(case, design), speed=peer.median / seconds.median,
        rate=case.workers * size.nbytes / seconds.median / 1e9, all_seconds=times[design],
    )  # fmt: skip


def row(found: Figures) -> list[str]:
    """A line of the table."""
    if found.times_kb is None:
        times, limit = "", ""
    else:
        times, limit = f"{found.times_kb:.3f}", f"{found.limit:.2f} (TCP {found.limit * TCP_LIMIT:.2f})"
    name = NAMES[found.design]
    return [found.case, name, found.seconds.show(), times, limit, f"{found.speed:.2f}", f"{found.rate:.2f}"]


COLUMNS = ("case", "design", "seconds [min..max]", "x K/B", "limit x K/B", "speed/Gloo", "GB/s")


def run(cases: Sequence[tuple[Case, Size]], designs: Sequence[Design], path: Path | None) -> None:
    """Measure, print, write."""
    console = Console(highlight=False)
    found = [figure for case, size in cases for figure in measure(case, size, designs, console)]
    title = (
        f"one synchronisation of K = {cases[0][1].nbytes / 1e6:g} MB fp32 among workers+servers; B: a link's rate; "
        "GB/s: gradient reduced"
    )
    report(console, [table(title, COLUMNS, [row(figure) for figure in found])], found, path)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    goals: Annotated[
        bool, typer.Option("--goals", help="The project's three cases, each with its own shards and window.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Workers, each with K bytes of gradient.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Reduction servers; as many as workers reaches full speed.")] = 4,
    rate: Annotated[float, typer.Option(help="Mbit/s of every link, both directions (netlab: needs root).")] = 1000.0,
    loopback: Annotated[bool, typer.Option("--loopback", help="No links: all on this machine's loopback.")] = False,
    megabytes: Annotated[float, typer.Option(min=0.01, help="K, in 10^6 bytes.")] = 100.0,
    steps: Annotated[int, typer.Option(min=1, help="Synchronisations measured in a round.")] = 6,
    warm_up: Annotated[int, typer.Option(min=0, help="Synchronisations before those.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each one both designs, one after the other.")] = 3,
    shard_kib: Annotated[
        int, typer.Option(min=1, help="Rallypoint's shards, in KiB.")
    ] = _DEFAULTS.network.shard_bytes // 1024,
    window: Annotated[
        int, typer.Option(min=1, help="Shards under way from a worker to a server.")
    ] = _DEFAULTS.network.window,
    hold_kib: Annotated[
        int, typer.Option(min=0, help="KiB out of turn that a server holds before it slows the senders down.")
    ] = _DEFAULTS.network.hold_bytes // 1024,
    in_flight_kib: Annotated[
        int, typer.Option(min=0, help="KiB on their way to one host at once; 0: the kernel's choice.")
    ] = _DEFAULTS.network.in_flight_bytes // 1024,
    pace: Annotated[float, typer.Option(min=0.0, help="Rallypoint's pace_mbit.")] = 0.0,
    unpaced: Annotated[bool, typer.Option("--unpaced", help="Rallypoint with pacing=off.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="With tune=auto: it needs 150 steps of warm-up.")] = False,
    optimizer: Annotated[str, typer.Option(help="adamw, fused (AdamW by torch's fused kernel) or sgd.")] = "adamw",
    alone: Annotated[bool, typer.Option("--alone", help="Rallypoint without Gloo.")] = False,
    tls: Annotated[bool, typer.Option("--tls", help="Measure Rallypoint with TLS too.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures and the machine's facts here.")] = None,
) -> None:
    """Time one synchronisation of K MB for n workers: Rallypoint's servers, which step the optimizer too, Gloo's
    all-reduce, which only sums, and Gloo with torch's step on each worker, interleaved.

    Every worker, every server and the coordinator gets a host of its own, with a link of the given rate. The time of a
    synchronisation is from when every worker holds one version to when every worker holds the next; the least possible
    is K/B with as many servers as workers, and 2(n-1)/n x K/B for a ring.
    """
    size = Size(
        words=int(megabytes * 1e6 / 4), steps=steps, warm_up=warm_up, rounds=rounds,
        shard_bytes=shard_kib * 1024, window=window, hold_bytes=hold_kib * 1024, in_flight_bytes=in_flight_kib * 1024,
        pace_mbit=pace, pacing="off" if unpaced else "auto", tune="auto" if tune else "off",
        optimizer=cast(Optimizer, optimizer),
    )  # fmt: skip
    one = (Case(workers, servers, None if loopback else rate), size)
    designs: tuple[Design, ...] = ("rallypoint", *(("tls",) if tls else ()), *(() if alone else ("gloo", "gloo-step")))
    run([(case, replace(size, **tuning)) for case, tuning in GOALS] if goals else [one], designs, json)


if __name__ == "__main__":
    main(app)
