"""What a server's memory comes to when one of two workers is on a link a hundred times slower than the other's.

    python benchmarks/slow_follower.py

With a quorum of one the fast worker goes on alone, so versions are made far faster than the slow one can take them. A
server that kept every version for it would need gigabytes within a minute.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer
from rich.console import Console

from cluster import Members, Place, Site, Spread, main, report, table
from rallypoint.config import JobConfig
from reduce_member import Task

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.netlab import Netlab

_DEFAULTS = JobConfig()
_STEPS = 1 << 20  # more than are ever made: the benchmark ends it
_BEGUN = 5  # the version at which the server has all the memory that a job without a slow follower needs
_TICK_S = 0.2
_START_S = 60.0


class Result(msgspec.Struct, frozen=True):
    """The server's resident memory, in bytes: when version 5 was there, and afterwards; what it sent meanwhile."""

    start: int
    after: Spread
    sent: int


@contextlib.contextmanager
def _site(fast_mbit: float, slow_mbit: float) -> Iterator[Site]:
    with Netlab(hosts=4, rate_mbit=fast_mbit) as lab:
        coordinator, server, fast, slow = lab.hosts
        slow.set_rate(slow_mbit)
        yield Site(coordinator, [fast, slow], [server], "eth0")


def measure(fast_mbit: float, slow_mbit: float, mib: int, seconds: float) -> Result:
    """Run a job of `mib` MiB of parameters for `seconds` after its first versions."""
    with _site(fast_mbit, slow_mbit) as at, Members() as members:
        members.start_rallypoint(at)
        milestone = members.folder / "begun"
        tasks = [
            Task(
                "rallypoint", rank=rank, workers=2, words=mib << 18, steps=_STEPS,
                shard_bytes=_DEFAULTS.network.shard_bytes,
                window=_DEFAULTS.network.window, hold_bytes=_DEFAULTS.network.hold_bytes,
                in_flight_bytes=_DEFAULTS.network.in_flight_bytes,
                quorum=1, milestone=None if rank else (_BEGUN, str(milestone)),
            )
            for rank in range(2)
        ]  # fmt: skip
        members.start_workers(at, "reduce_member.py", tasks)
        members.until(milestone, _START_S)
        server = psutil.Process(members.pid("server0"))
        start, after, sent = server.memory_info().rss, [], _sent(at.servers[0])
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(_TICK_S)
            after.append(float(server.memory_info().rss))
        return Result(start, Spread.of(after), _sent(at.servers[0]) - sent)


def _sent(place: Place) -> int:
    """Bytes that its link has sent so far."""
    counter = place.popen(["cat", "/sys/class/net/eth0/statistics/tx_bytes"], stdout=subprocess.PIPE)
    return int(counter.communicate()[0])


def command(
    mib: Annotated[int, typer.Option(min=1, help="MiB of parameters.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="How long to look.")] = 60.0,
    fast: Annotated[float, typer.Option(help="Mbit/s of the other links.")] = 1000.0,
    slow: Annotated[float, typer.Option(help="Mbit/s of the slow worker's link.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the results there.")] = None,
) -> None:
    """Measure a server's memory beside a slow follower (root: it uses network namespaces)."""
    results = [measure(fast, slow, mib, seconds) for _ in range(rounds)]
    rows = [
        [f"{r.start / 1e6:.0f} MB", f"{r.after.median / 1e6:.0f} MB", f"{r.after.greatest / 1e6:.0f} MB",
         f"{r.after.greatest / r.start:.2f}", f"{r.sent / (mib << 20):.0f}"]
        for r in results
    ]  # fmt: skip
    title = f"A server's resident memory, {mib} MiB of parameters, quorum 1, links of {fast:g} and {slow:g} Mbit/s"
    columns = ["at version 5", "then, median", f"most in {seconds:g} s", "most / start", "models sent"]
    report(Console(highlight=False), [table(title, columns, rows)], results, json)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(command)
    main(app)
