"""What does it cost a step to be watched: by Prometheus, and with the page open in a browser?

    python benchmarks/watching.py

Runs in turn: unwatched; with ``--metrics``, every process scraped each `every` seconds (Prometheus: 15); with
``--watch``, one browser's stream read to the end. The figure of a run is its median step after a warm-up. All kinds
run once in each round, so what else the machine does falls on all of them; a round's ratio is to its unwatched run.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rallypoint.launch.chaos.report import ledger_of
from rallypoint.launch.console import RunConsole
from rallypoint.launch.launcher import launch
from rallypoint.launch.plan import Launch

KINDS = ("unwatched", "metrics", "page")
_WARM_UP = 0.2  # of the steps
_LOOK_S = 0.2


def median_step(kind: str, steps: int, batch: int, every: float) -> float:
    """The median seconds of a step of one run."""
    with tempfile.TemporaryDirectory() as parent, (Path(parent) / "console.txt").open("w") as log:
        folder, targets = Path(parent) / "run", Path(parent) / "targets"
        member = Path(__file__).with_name("watching_member.py")
        plan = Launch(
            worker=(sys.executable, str(member), str(steps), str(batch)), workers=(1, 2), servers=1,
            folder=str(folder), metrics=str(targets) if kind == "metrics" else "", watch=kind == "page",
        )  # fmt: skip
        over = threading.Event()
        watch: dict[str, Callable[[], None]] = {
            "metrics": lambda: scrape(targets, every, over), "page": lambda: read(Path(log.name), over),
        }  # fmt: skip
        watcher = threading.Thread(target=watch.get(kind, lambda: None))
        watcher.start()
        try:
            if launch(plan, RunConsole(Console(file=log, highlight=False))):
                raise SystemExit(f"the run failed: {Path(log.name).read_text()[-2000:]}")
        finally:
            over.set()
            watcher.join()
        times = ledger_of(folder, steps, 0).times
    return statistics.median(b - a for a, b in itertools.pairwise(times[int(_WARM_UP * len(times)) :]))


def scrape(targets: Path, every: float, over: threading.Event) -> None:
    """Ask every process that the run names for its metrics, each `every` seconds."""
    scraped = 0
    while not over.wait(every):
        for file in targets.glob("*.json"):
            with suppress(OSError, ValueError):
                for one in json.loads(file.read_text()):
                    scraped += len(get(one["targets"][0], "/metrics"))
    if not scraped:
        raise SystemExit("nothing was scraped: more --steps, or a smaller --every")


def get(address: str, path: str) -> bytes:
    """The answer to a request."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def read(console: Path, over: threading.Event) -> None:
    """Read the page's stream as a browser does, from when its address is printed until it ends."""
    while (found := re.search(r"http://(\S+)/\?token=(\S+)", console.read_text())) is None:
        if over.wait(_LOOK_S):
            raise SystemExit("no page was served")
    connection = http.client.HTTPConnection(found[1], timeout=60)
    with suppress(OSError):
        connection.request("GET", "/news", headers={"Cookie": f"rallypoint={found[2]}", "Accept-Encoding": "gzip"})
        connection.getresponse().read()
    connection.close()


def command(
    steps: Annotated[int, typer.Option(min=20, help="Steps of a run.")] = 3000,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a replica: how long a step takes.")] = 64,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two scrapes of each process.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turn.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the seconds of each run here.")] = None,
) -> None:
    """Measure what it costs a step to be watched."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(rounds):
        for kind in KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]:
            found[kind].append(median_step(kind, steps, batch, every))
    table = Table("", "ms a step [min..max]", "to unwatched, median of rounds [min..max]")
    for kind, seconds in found.items():
        ratios = [one / plain for one, plain in zip(seconds, found["unwatched"], strict=True)]
        table.add_row(
            kind, f"{1e3 * statistics.median(seconds):.2f} [{1e3 * min(seconds):.2f}..{1e3 * max(seconds):.2f}]",
            f"{statistics.median(ratios) - 1:+.2%} [{min(ratios) - 1:+.2%}..{max(ratios) - 1:+.2%}]",
        )  # fmt: skip
    Console(highlight=False).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(found))


if __name__ == "__main__":
    typer.run(command)
