"""A data set in a store behind a slow link: how much of the link is used, and how often does each byte leave the store?

    python benchmarks/remote.py                      # root, for network namespaces; about 3 minutes
    python benchmarks/remote.py --megabytes 24 --rate-mbit 0 --hosts 2       # on loopback

The store is a web server (`remote_store.py`) on a host of its own; each host has a link of --rate-mbit. The data set is
Parquet files of bytes that cannot be compressed, in row groups of 2 MB. A job reads it in windows, --passes passes
long. The share of the store's link is what the bytes that the store sent would take at the link's rate, of the time
that the job took; HTTP's, TCP's and Ethernet's headers count against us. "Fails" is a store of which one request in ten
fails. The digest is that of the trained weights: it must be the same in each row of the same number of passes.
"Made" are the seconds in which the data set was made, "again" those in which a worker made it anew after the job, and
had its first micro-batch of a step in the middle: what a resume takes. "First" are the seconds from the loop's begin
to its first micro-batch; all that is before the first byte, and after the last one, counts as time of the job.

"curl" is what can be had at most: curl gets the same files over the same link, four at a time, and nobody computes.
"S3" is moto's server (``pip install s3fs 'moto[server]'``), read with s3fs; without them the row is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import typer
from rich.console import Console

from cluster import FOLDER, BenchmarkFailed, Case, Members, Place, main, report, site, table
from remote_member import Result, Task

ROW, GROUP, FILE_MB = 64 << 10, 32, 24


class Row(msgspec.Struct, frozen=True):
    """One measurement: bytes of the data set and those that the store sent, and seconds of the job."""

    name: str
    hosts: int
    passes: int
    nbytes: int
    sent: int
    failed: int
    seconds: float
    share: float
    first: float
    made: float
    resumed: float
    digest: str


def write(folder: Path, megabytes: int) -> tuple[int, int]:
    """Write the data set. Returns its bytes, and how many samples it has."""
    generator = np.random.default_rng(0)
    rows = 0
    for number in range(max(1, megabytes // FILE_MB)):
        count = min(megabytes, FILE_MB) * (1 << 20) // ROW
        values = [generator.bytes(ROW) for _ in range(count)]
        table_ = pa.table({"x": pa.array(values, pa.binary())})
        path = folder / f"{number:03d}.parquet"
        pyarrow.parquet.write_table(
            table_, path, row_group_size=GROUP, compression="none", use_dictionary=False, write_statistics=False
        )
        rows += count
    return sum(path.stat().st_size for path in folder.iterdir()), rows


@contextlib.contextmanager
def store(place: Place, folder: Path, every: int, *, s3: bool = False) -> Iterator[str]:
    """A store at a place: its URL."""
    script = [str(FOLDER / "remote_s3.py"), str(folder), place.address]
    if not s3:
        script = [str(FOLDER / "remote_store.py"), str(folder), place.address, str(every)]
    process = place.popen([sys.executable, *script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://{place.address}:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def figures(place: Place, url: str) -> dict[str, int]:
    """What the store has sent."""
    program = f"import urllib.request; print(urllib.request.urlopen({url + '/figures'!r}).read().decode())"
    with place.popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        found: dict[str, int] = json.loads(process.communicate(timeout=20)[0])
    return found


def measure(name: str, case: Case, data: Path, about: tuple[int, int], settings: dict[str, int | bool]) -> Row:
    """Run one job."""
    nbytes, rows = about
    passes, replicas, batch, s3 = int(settings["passes"]), 4, 8, bool(settings.get("s3"))
    with site(case) as at, store(at.coordinator, data, int(settings["every"]), s3=s3) as url, Members() as members:
        members.start_rallypoint(at)
        urls = tuple(f"{'s3://data' if s3 else url}/{path.name}" for path in sorted(data.iterdir()))
        options = {"endpoint_url": url, "key": "test", "secret": "test"} if s3 else {}
        tasks = [
            Task(
                urls, str(members.folder / f"cache{number}") if settings["cache"] else "",
                passes * rows // (replicas * batch), replicas, batch, int(settings["processes"]),
                f"{url}/figures", options,
            )
            for number in range(case.workers)
        ]  # fmt: skip
        members.start_workers(at, "remote_member.py", tasks)
        members.wait(600)
        told, results = figures(at.coordinator, url), members.results(at, Result)
    seconds = max(one.ended for one in results) - min(one.began for one in results)
    digests = {one.digest for one in results}
    assert len(digests) == 1, digests
    sent = min(one.sent for one in results)  # at the end of the last step, when no sample is wanted any more
    first = max(one.first - one.began for one in results)
    return Row(
        name, case.workers, passes, nbytes, sent, told["failed"], seconds, case.wire_seconds(sent) / seconds, first,
        max(one.made for one in results), max(one.resumed for one in results), digests.pop(),
    )  # fmt: skip


def curl(case: Case, data: Path, nbytes: int) -> Row:
    """What the link carries at most: curl gets the files."""
    with site(case) as at, store(at.coordinator, data, 0) as url:
        argv = ["curl", "--silent", "--fail", "--parallel", "--parallel-max", "4"]
        for path in sorted(data.iterdir()):
            argv += ["--output", "/dev/null", f"{url}/{path.name}"]
        before = time.monotonic()
        with at.workers[0].popen(argv, stdin=subprocess.DEVNULL) as process:
            if process.wait(600):
                raise BenchmarkFailed(f"curl ended with status {process.returncode}")
        seconds, sent = time.monotonic() - before, figures(at.coordinator, url)["sent"]
    return Row("curl", 1, 1, nbytes, sent, 0, seconds, case.wire_seconds(sent) / seconds, 0.0, 0.0, 0.0, "")


def command(
    megabytes: Annotated[int, typer.Option(min=2, help="Bytes of the data set, in millions or so.")] = 96,
    rate_mbit: Annotated[float, typer.Option(help="Of each link; 0: loopback.")] = 200.0,
    hosts: Annotated[int, typer.Option(min=2, help="Of the larger job.")] = 4,
    passes: Annotated[int, typer.Option(min=1, help="Of the larger job.")] = 3,
    processes: Annotated[int, typer.Option(min=0, help="Loader processes of each worker.")] = 2,
    only: Annotated[list[str], typer.Option(help="Only jobs of this name; may be repeated.")] = [],  # noqa: B006
    json_: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
) -> None:
    """Measure, and print the table."""
    common: dict[str, int | bool] = {"processes": processes, "cache": True, "every": 0, "passes": 1}
    many = {**common, "passes": passes}
    one, more = (Case(number, 1, rate_mbit or None) for number in (1, hosts))
    plan: list[tuple[str, Case, dict[str, int | bool]]] = [
        ("no cache", one, {**common, "cache": False}), ("cache", one, common),
        ("cache, fails", one, {**common, "every": 10}),
        ("no cache", more, {**many, "cache": False}), ("cache", more, many),
        ("cache, fails", more, {**many, "every": 10}),
    ]  # fmt: skip
    if importlib.util.find_spec("moto") and importlib.util.find_spec("s3fs"):
        plan.insert(3, ("S3, cache", one, {**common, "s3": True}))
    with tempfile.TemporaryDirectory(prefix="rallypoint-remote-") as folder:
        about = write(Path(folder), megabytes)
        found = []
        if (not only or "curl" in only) and shutil.which("curl"):
            found.append(curl(one, Path(folder), about[0]))
        for name, case, settings in [one for one in plan if not only or one[0] in only]:
            found.append(measure(name, case, Path(folder), about, settings))
            print(found[-1], file=sys.stderr, flush=True)
    rows = [
        [
            str(row.hosts), row.name, str(row.passes), f"{row.sent / row.nbytes:.3f}", str(row.failed),
            f"{row.seconds:.1f}", f"{row.share:.1%}", f"{row.first:.2f}",
            f"{row.made:.2f}", f"{row.resumed:.2f}", row.digest[:8],
        ]
        for row in found
    ]  # fmt: skip
    columns = ["hosts", "", "passes", "sent / data", "failed", "seconds", "of the link"]
    columns += ["first", "made", "again", "digest"]
    title = f"{about[0] / 1e6:.0f} MB, {about[1]} samples, links of {rate_mbit:g} Mbit/s"
    report(Console(highlight=False), [table(title, columns, rows)], found, json_)


app = typer.Typer(add_completion=False)
app.command(help=__doc__)(command)

if __name__ == "__main__":
    main(app)
