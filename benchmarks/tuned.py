"""How near `tune="auto"` comes to the best of a grid of settings tried by hand, and what it says on the way.

    python benchmarks/tuned.py --setup small --json tuned.json      # 4+4 at 62.5 Mbit/s
    python benchmarks/tuned.py --setup many --json tuned.json       # 8+8 at 200 Mbit/s
    python benchmarks/tuned.py --setup few --json tuned.json        # 4+2 at 100 Mbit/s

Each job synchronises K bytes again and again, as in `reduce.py`, from one seed. A grid of `pace_mbit` x
`in_flight_bytes` is measured, then the tuned job after it has settled, then the grid's best and the default again. What
is in the JSON file already is not measured again, so a call may end early (`--limit`) and another one goes on.
`--bytes` runs a job of as many steps as the tuned one, without tuning and links (bytes depend on neither), for its
sha256.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from cluster import TUNING, Case, Members, Site, Spread, machine_facts, main, site, step_times, table
from rallypoint.core.layout import SHARD_BYTES
from rallypoint.core.plan.tuning import shards_for
from reduce_member import Result, Task

_PACED = 0.95  # of a link's rate: the pace of the grid
_KIB = (0, 128, 256, 512)


class Setup(msgspec.Struct, frozen=True):
    """Who is there, how much each synchronises, and how many steps a job has that is tuned."""

    case: tuple[int, int, float]
    megabytes: float
    tuned_steps: int = 340


SETUPS = {
    "small": Setup((4, 4, 62.5), 2.0), "many": Setup((8, 8, 200.0), 10.0), "few": Setup((4, 2, 100.0), 3.0),
}  # fmt: skip


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One job: its settings, seconds of each measured step, the sha256 of the result, what was decided in it."""

    setup: str
    name: str  # "grid", "again", "default", "tuned", "bytes"
    pace_mbit: float = 0.0
    in_flight_kib: int = 0
    shard_kib: int
    seconds: list[float]
    before: list[float] = []  # seconds of the steps while it was tuned
    sha256: str
    said: list[str] = []

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.setup, self.name, self.pace_mbit, self.in_flight_kib

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Found(msgspec.Struct):
    """The JSON file."""

    cells: list[Cell] = []
    machine: dict[str, object] = {}


def job(at: Site, setup: str, cell: tuple[str, float, int], shard: int, steps: int, warm_up: int) -> Cell:
    """Run one job: `warm_up` steps that are not measured, then so many that are."""
    name, pace, kib = cell
    tune: Literal["off", "auto"] = "auto" if name == "tuned" else "off"
    tasks = [
        Task(
            design="rallypoint", rank=rank, workers=len(at.workers), words=int(SETUPS[setup].megabytes * 1e6 / 4),
            steps=warm_up + steps, shard_bytes=shard, window=4, hold_bytes=256 << 20, in_flight_bytes=kib << 10,
            pace_mbit=pace, tune=tune, weighted=True,
        )
        for rank in range(len(at.workers))
    ]  # fmt: skip
    with Members() as members:
        members.start_rallypoint(at)
        members.start_workers(at, "reduce_member.py", tasks)
        members.wait(600.0)
        results = members.results(at, Result)
        said = members.sentences(*TUNING)
    times = step_times([result.finishes for result in results], 1)
    (digest,) = {result.sha256 for result in results}
    return Cell(
        setup=setup, name=name, pace_mbit=pace, in_flight_kib=kib, shard_kib=shard >> 10, seconds=times[-steps:],
        before=times[:-steps] if name == "tuned" else [], sha256=digest, said=said,
    )  # fmt: skip


def plan(setup: str, found: Found) -> list[tuple[str, float, int]]:
    """The jobs of a set-up, in order: (name, pace, KiB). The last ones follow from the grid."""
    rate = SETUPS[setup].case[2]
    grid = [("grid", pace, kib) for pace in (0.0, _PACED * rate) for kib in _KIB]
    measured = [cell for cell in found.cells if cell.setup == setup and cell.name == "grid"]
    best = min(measured, key=lambda cell: cell.median, default=None)
    again = [] if best is None or len(measured) < len(grid) else [("again", best.pace_mbit, best.in_flight_kib)]
    return [("default", 0.0, 0), *grid, ("tuned", 0.0, 0), *again]


def rows(setup: str, found: Found) -> list[list[str]]:
    """The table's lines of a set-up whose jobs are all there."""
    own = [cell for cell in found.cells if cell.setup == setup]
    by_name = {cell.name: cell for cell in own}
    if not {"tuned", "again", "default"} <= by_name.keys():
        return []
    workers, servers, rate = SETUPS[setup].case
    case = Case(workers, servers, rate)
    ideal = case.wire_seconds(int(SETUPS[setup].megabytes * 1e6)) * max(1.0, workers / servers)
    grid = [cell for cell in own if cell.name == "grid"]
    plain = next(cell for cell in grid if not cell.pace_mbit and not cell.in_flight_kib)
    tuned, again = by_name["tuned"], by_name["again"]
    shown = [
        ("default", by_name["default"]), (f"{tuned.shard_kib} KiB shards", plain),
        ("best of the grid", min(grid, key=lambda cell: cell.median)), ("the same again", again),
        ("tuned" if any("in_flight_bytes" in line and "tuning has ended" in line for line in tuned.said[-1:])
         else "tuned (it has not ended)", tuned),
    ]  # fmt: skip
    return [
        [
            case.name, name, f"{cell.pace_mbit:g}", f"{cell.in_flight_kib}", str(cell.shard_kib),
            Spread.of(cell.seconds).show(), f"{cell.median / ideal:.3f}", f"{100 * again.median / cell.median:.1f} %",
            cell.sha256[:12],
        ]
        for name, cell in shown
    ]  # fmt: skip


COLUMNS = ("case", "job", "pace", "KiB", "shards", "seconds [min..max]", "x limit", "of the best", "sha256")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    setup: Annotated[list[str], typer.Option(help=f"{', '.join(SETUPS)}; may be given again.")],
    json: Annotated[Path, typer.Option(help="Figures, also of earlier calls.")],
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a job.")] = 10,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before those, of a job that is not tuned.")] = 3,
    bytes_: Annotated[bool, typer.Option("--bytes", help="Only the sha256 of a job without tuning.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds after which no further job begins.")] = 420.0,
) -> None:
    """Measure what is missing of these set-ups, print the tables, write the file."""
    console, end = Console(highlight=False, width=180), time.monotonic() + limit
    fresh = Found(machine=dict(machine_facts()))
    found = msgspec.json.decode(json.read_bytes(), type=Found) if json.exists() else fresh
    for name in setup:
        if bytes_:
            workers, servers, _ = SETUPS[name].case
            with site(Case(workers, servers, None)) as at:
                found.cells.append(job(at, name, ("bytes", 0.0, 0), SHARD_BYTES, steps, SETUPS[name].tuned_steps))
            json.write_bytes(msgspec.json.encode(found))
        else:
            measure(name, found, json, (steps, warm_up, end), console)
    lines = [line for name in SETUPS for line in rows(name, found)]
    console.print(table("`tune=auto` beside a grid by hand; x limit: of K/B on the busiest links", COLUMNS, lines))
    for cell in found.cells:
        if cell.name == "tuned" and cell.setup in setup:
            plain = {one.sha256 for one in found.cells if (one.setup, one.name) == (cell.setup, "bytes")}
            same = "not compared" if not plain else "as without tuning" if plain == {cell.sha256} else "OTHER BYTES"
            console.print(f"{cell.setup}: sha256 {cell.sha256[:12]}, {same}", *cell.said, sep="\n  ")


def measure(name: str, found: Found, path: Path, times: tuple[int, int, float], console: Console) -> None:
    """The jobs of one set-up that are not in the file yet, until the time is over."""
    steps, warm_up, end = times
    workers, servers, rate = SETUPS[name].case
    shards = shards_for(int(SETUPS[name].megabytes * 1e6), workers, servers)[0]
    if not _missing(name, found):
        return
    with site(Case(workers, servers, rate)) as at:
        while (left := _missing(name, found)) and time.monotonic() < end:
            shard = SHARD_BYTES if left[0][0] == "default" else shards
            cell = job(at, name, left[0], shard, steps, SETUPS[name].tuned_steps if left[0][0] == "tuned" else warm_up)
            found.cells.append(cell)
            path.write_bytes(msgspec.json.encode(found))
            console.print(f"{name}: {cell.key[1:]}: {Spread.of(cell.seconds).show()} s", style="dim")


def _missing(name: str, found: Found) -> Sequence[tuple[str, float, int]]:
    here = {cell.key for cell in found.cells}
    return [one for one in plan(name, found) if (name, *one) not in here]


if __name__ == "__main__":
    main(app)
