"""What does it cost a step to be watched: by Prometheus, and with the page open in a browser?

    python benchmarks/watching.py

Runs in turn: unwatched; with ``--metrics``, every process scraped each `every` seconds (Prometheus: 15); with
``--watch``, one browser's stream read to the end; with both of them and ``fingerprints=100``. The figures of a run are
its median step after a warm-up, and its mean step, in which the recorded steps count too. All kinds run once in each
round, so what else the machine does falls on all of them; a round's ratio is to its unwatched run.
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

KINDS = {
    "unwatched": (), "metrics": ("metrics",), "page": ("page",), "everything": ("metrics", "page", "fingerprints"),
}  # fmt: skip
_FINGERPRINTS = 100
_WARM_UP = 0.2  # of the steps
_LOOK_S = 0.2


def step_times(kind: str, steps: int, batch: int, every: float) -> tuple[float, float]:
    """The median and the mean seconds of a step of one run."""
    watched = KINDS[kind]
    with tempfile.TemporaryDirectory() as parent, (Path(parent) / "console.txt").open("w") as log:
        folder, targets = Path(parent) / "run", Path(parent) / "targets"
        member = Path(__file__).with_name("watching_member.py")
        recorded = _FINGERPRINTS if "fingerprints" in watched else 0
        plan = Launch(
            worker=(sys.executable, str(member), str(steps), str(batch), str(recorded)), workers=(1, 2), servers=1,
            folder=str(folder), metrics=str(targets) if "metrics" in watched else "", watch="page" in watched,
        )  # fmt: skip
        over = threading.Event()
        watch: dict[str, Callable[[], None]] = {
            "metrics": lambda: scrape(targets, every, over), "page": lambda: read(Path(log.name), over),
        }  # fmt: skip
        watchers = [threading.Thread(target=watch[one]) for one in watched if one in watch]
        for watcher in watchers:
            watcher.start()
        try:
            if launch(plan, RunConsole(Console(file=log, highlight=False))):
                raise SystemExit(f"the run failed: {Path(log.name).read_text()[-2000:]}")
        finally:
            over.set()
            for watcher in watchers:
                watcher.join()
        times = ledger_of(folder, steps, 0).times
    each = [b - a for a, b in itertools.pairwise(times[int(_WARM_UP * len(times)) :])]
    return statistics.median(each), statistics.mean(each)


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
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for turn in range(rounds):
        order = list(KINDS)
        for kind in order[turn % len(order) :] + order[: turn % len(order)]:
            found[kind].append(step_times(kind, steps, batch, every))
    table = Table("", "ms a step [min..max]", "to unwatched, median of rounds [min..max]", "mean step to unwatched's")
    for kind, both in found.items():
        seconds = [median for median, _ in both]
        medians, means = (
            [one[which] / plain[which] - 1 for one, plain in zip(both, found["unwatched"], strict=True)]
            for which in (0, 1)
        )
        table.add_row(
            kind, f"{1e3 * statistics.median(seconds):.2f} [{1e3 * min(seconds):.2f}..{1e3 * max(seconds):.2f}]",
            *(f"{statistics.median(all):+.2%} [{min(all):+.2%}..{max(all):+.2%}]" for all in (medians, means)),
        )  # fmt: skip
    Console(highlight=False).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(found))


if __name__ == "__main__":
    typer.run(command)
