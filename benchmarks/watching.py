"""What does it cost a step to be watched: by Prometheus, and with the page open in a browser?

    python benchmarks/watching.py

Runs in turn: unwatched; with ``--metrics``, every process scraped each `every` seconds (Prometheus: 15); with
``--watch``, one browser's stream read to the end; with both of them and ``fingerprints=100``. The figures of a run are
its median step after a warm-up, and its mean step, in which the recorded steps count too. All kinds run once in each
round, so what else the machine does falls on all of them; a round's ratio is to its unwatched run.

Where runs of one kind differ by more than watching costs, the second table says more: the share of one core that the
page's process uses (at a low priority, after its start), and how long the processes took to answer all scrapes, as a
share of the time.
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
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
import typer
from rich.console import Console
from rich.table import Table

from rallypoint.launch.commands.chaos import ledger_of
from rallypoint.launch.console import RunConsole
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import launch
from rallypoint.watch.app import HEADER

KINDS = {
    "unwatched": (), "metrics": ("metrics",), "page": ("page",), "everything": ("metrics", "page", "fingerprints"),
}  # fmt: skip
_FINGERPRINTS = 100
_WARM_UP = 0.2  # of the steps
_LOOK_S = 0.2
_STARTED_S = 5.0  # after that the page's process has imported what it needs


class Took(NamedTuple):
    """Seconds of a step of one run, and the share of the time that each watcher took."""

    median: float
    mean: float
    shares: dict[str, float]


def step_times(kind: str, steps: int, batch: int, every: float) -> Took:
    """Make one run."""
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
        shares: dict[str, float] = {}
        watch: dict[str, Callable[[], None]] = {
            "metrics": lambda: scrape(targets, every, over, shares),
            "page": lambda: read(Path(log.name), over),
        }  # fmt: skip
        watchers = [threading.Thread(target=watch[one]) for one in watched if one in watch]
        if "page" in watched:
            watchers.append(threading.Thread(target=lambda: page_share(over, shares)))
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
    return Took(statistics.median(each), statistics.mean(each), shares)


def page_share(over: threading.Event, shares: dict[str, float]) -> None:
    """Put the share of one core that the page's process uses, from `_STARTED_S` after its start on, into `shares`."""
    page, first, last = None, (0.0, 0.0), (0.0, 0.0)
    while not over.wait(_LOOK_S):
        with suppress(psutil.Error):
            if page is None:
                children = psutil.Process().children(recursive=True)
                page = next((one for one in children if "watch" in one.cmdline()), None)
            elif time.time() - page.create_time() > _STARTED_S:
                last = (time.monotonic(), sum(page.cpu_times()[:2]))
                first = first if first[0] else last
    if last[0] > first[0]:
        shares["page"] = (last[1] - first[1]) / (last[0] - first[0])


def scrape(targets: Path, every: float, over: threading.Event, shares: dict[str, float]) -> None:
    """Ask every process that the run names for its metrics, each `every` seconds."""
    scraped, took, rounds = 0, 0.0, 0
    while not over.wait(every):
        for file in targets.glob("*.json"):
            with suppress(OSError, ValueError):
                for one in json.loads(file.read_text()):
                    began = time.monotonic()
                    scraped += len(get(one["targets"][0], "/metrics"))
                    took += time.monotonic() - began
        rounds += 1
    if not scraped:
        raise SystemExit("nothing was scraped: more --steps, or a smaller --every")
    shares["metrics"] = took / (rounds * every)


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
        connection.request("GET", "/news", headers={HEADER: found[2], "Accept-Encoding": "gzip"})
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
    found: dict[str, list[Took]] = {kind: [] for kind in KINDS}
    for turn in range(rounds):
        order = list(KINDS)
        for kind in order[turn % len(order) :] + order[: turn % len(order)]:
            found[kind].append(step_times(kind, steps, batch, every))
    table = Table("", "ms a step [min..max]", "to unwatched, median of rounds [min..max]", "mean step to unwatched's")
    for kind, both in found.items():
        seconds = [one.median for one in both]
        medians, means = (
            [getattr(one, of) / getattr(plain, of) - 1 for one, plain in zip(both, found["unwatched"], strict=True)]
            for of in ("median", "mean")
        )
        table.add_row(
            kind, f"{1e3 * statistics.median(seconds):.2f} [{1e3 * min(seconds):.2f}..{1e3 * max(seconds):.2f}]",
            *(f"{statistics.median(all):+.2%} [{min(all):+.2%}..{max(all):+.2%}]" for all in (medians, means)),
        )  # fmt: skip
    Console(highlight=False).print(table, shares_of(found))
    if json_file is not None:
        json_file.write_text(json.dumps(found))


def shares_of(found: dict[str, list[Took]]) -> Table:
    """The table of what the watchers themselves took."""
    table = Table("", "the page's process, share of one core", "answering scrapes, share of the time")
    for kind, runs in found.items():
        each = [[run.shares[one] for run in runs if one in run.shares] for one in ("page", "metrics")]
        table.add_row(kind, *(
            f"{statistics.median(all):.2%} [{min(all):.2%}..{max(all):.2%}]" if all else "" for all in each
        ))  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(command)
