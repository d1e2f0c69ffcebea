"""How long does the page of a long run, or of a large one, take to draw in a real browser?

    python benchmarks/page.py --screenshots /tmp/pages

Writes the log of a run as its coordinator does (a million steps with deaths, joins, evaluations, snapshots; or 1,000
workers), serves it with ``rallypoint watch`` and opens it in headless Chromium, in light, dark and at a phone's width.
"opened to drawn" goes from the browser's navigation to the first frame with all of it; "news to drawn" from when
the page had the figures. Bytes are those of everything that the page loads.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rallypoint.coordinator.events import line_of
from rallypoint.core.protocol import (
    Applied,
    Finished,
    GpuSample,
    LinkSample,
    Members,
    Message,
    Metrics,
    Planned,
    Sampled,
    Say,
    Snapshotted,
    StepDone,
)

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.browser import Tab, browser

LOOKS = {"light": (1280, False), "dark": (1280, True), "phone": (390, False)}  # width (CSS pixels), dark?
_SERVERS, _REPLICAS = 8, 64
_MARK = "performance.getEntriesByName('{}').length > 0"


def write(folder: Path, steps: int, workers: int) -> Path:
    """Write the log of a run of so many steps and workers, of whom one is replaced now and then."""
    with (folder / "events.jsonl").open("wb") as log:
        for t, message in story(steps, workers):
            log.write(line_of(message, t))
    return folder


def story(steps: int, workers: int) -> Iterable[tuple[float, Message]]:
    """What the coordinator of such a run announces, and when (s)."""
    chance, t, servers = random.Random(0), 0.0, tuple(f"server{i}" for i in range(_SERVERS))
    here = [f"worker{i}" for i in range(workers)]
    yield t, Planned(steps, _REPLICAS, "tokens", 124_000_000, 500, tuple(here), servers, items=64 * 1024)
    yield t, Members("1.1", tuple(here), (), servers)
    born = workers
    for step in range(steps):
        t += chance.uniform(0.09, 0.11)
        if step % (steps // 100 + 1) == steps // 200:  # a worker dies; another takes its place a while later
            gone = here.pop(chance.randrange(len(here)))
            yield t, Members(f"1.{step}", tuple(here), (), servers)
            yield t, Say(f"{gone} is gone: its connection ended")
            t += 2.0
            here.append(f"worker{born}")
            born += 1
            yield t, Members(f"1.{step}1", tuple(here), (), servers)
        loss = 2 + 8 * math.exp(-6 * step / steps) + chance.gauss(0, 0.05)
        rate = 3e-4 * min(1.0, step / (0.02 * steps + 1)) * (1 + math.cos(math.pi * step / steps)) / 2
        yield t, StepDone(step, loss, 64 * 1024, lr=rate, figures={"accuracy": 1 - loss / 11})
        if step % 100 == 0:
            late = {worker: chance.expovariate(100) for worker in here}
            yield t, Applied(step, _REPLICAS, 1.8e9 + t, late)
            yield from ((t, sample(chance, int(one[6:]), servers)) for one in here[step // 100 % 5 :: 5])
        if step % (steps // 50 + 1) == 0:
            yield t, Metrics(step, {"val_loss": loss + 0.1})
            yield t, Snapshotted(f"step-{step}", step, 1_490_000_000, 3.2)
    yield t, Finished()


def sample(chance: random.Random, number: int, servers: tuple[str, ...]) -> Sampled:
    """What a worker tells of its machine, on which eight of them are, and of its links."""
    links = {
        one: LinkSample(chance.expovariate(2000), chance.uniform(0, 9e6), chance.uniform(0, 9e6)) for one in servers
    }
    return Sampled(
        5.0, chance.uniform(0.5, 1), int(3e11), int(5e11), 1e6, 5e7, 1e9, 1e9, 3.0, int(9e9), chance.uniform(0, 0.1),
        tuple(GpuSample(chance.uniform(0.8, 1), int(7e10), int(8e10)) for _ in range(8)), links,
        member=f"worker{number}", host=f"node{number // 8:03}",
    )  # fmt: skip


def measure(tab: Tab, address: str, width: int, dark: bool) -> tuple[float, float, int]:
    """Open the page. Returns ms from the navigation to the drawn page, ms from its figures to that, and bytes."""
    before = tab.received
    tab.open(address, width=width, dark=dark, scale=2 if width < 500 else 1)
    tab.until(_MARK.format("drawn"), 300)
    came, drawn = (tab.evaluate(f"performance.getEntriesByName('{name}')[0].startTime") for name in ("came", "drawn"))
    return drawn, drawn - came, tab.received - before


def show(folder: Path, name: str, rounds: int, screenshots: Path | None) -> dict[str, list[tuple[float, float, int]]]:
    """Serve the page of the run in `folder` and open it `rounds` times in each look."""
    argv = [sys.executable, "-m", "rallypoint.cli", "watch", str(folder)]
    found: dict[str, list[tuple[float, float, int]]] = {look: [] for look in LOOKS}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server, browser() as tab:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split()[-1]
            measure(tab, address, 1280, False)  # waits until the log is read
            for _ in range(rounds):
                for look, (width, dark) in LOOKS.items():
                    found[look].append(measure(tab, address, width, dark))
            for look, (width, dark) in LOOKS.items():
                if screenshots is not None:
                    measure(tab, address, width, dark)
                    tab.screenshot(screenshots / f"{name}-{look}.png", whole=True)
            if tab.errors:
                raise SystemExit(f"the page has failed: {tab.errors}")
        finally:
            server.terminate()
    return found


def command(
    steps: Annotated[int, typer.Option(min=100, help="Steps of the long run.")] = 1_000_000,
    workers: Annotated[int, typer.Option(min=2, help="Workers of the large run.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is opened.")] = 5,
    screenshots: Annotated[Path | None, typer.Option(help="A folder for pictures of the pages.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Measure how long the page takes to draw."""
    if screenshots is not None:
        screenshots.mkdir(parents=True, exist_ok=True)
    runs = {"long": (steps, 16), "large": (2000, workers)}
    told = {}
    table = Table("run", "look", "opened to drawn, ms [min..max]", "news to drawn, ms [min..max]", "kB")
    for name, (length, members) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            found = show(write(Path(folder), length, members), name, rounds, screenshots)
        told[name] = found
        for look, figures in found.items():
            all_of_it, drawing, received = zip(*figures, strict=True)
            row = [f"{statistics.median(ms):.0f} [{min(ms):.0f}..{max(ms):.0f}]" for ms in (all_of_it, drawing)]
            table.add_row(f"{length:,} steps, {members:,} workers", look, *row, f"{max(received) / 1e3:.0f}")
    Console(highlight=False).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(told))


if __name__ == "__main__":
    typer.run(command)
