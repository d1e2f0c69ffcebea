"""What one shard and step costs: Python calls, project files and processor time, by thread. The budget of I13.

    python benchmarks/hot_path.py                 # in one process (`python train.py`), then one worker and one server
    python benchmarks/hot_path.py --json hot.json

Each job is played with two numbers of shards and two of steps. The figure is the difference of the differences: start,
end, and what each step costs once whatever the number of shards, cancel out. Calls are counted by Python's profiler,
processor time is measured without it. Calls vary by one in a hundred with how the threads meet, processor time with the
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import rallypoint as rp
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.server.service import ServerService, run_servers
from rallypoint.testing.processes import ProcessCluster, server_main
from rallypoint.worker.loop.session import Job

HOME = str(Path(rp.__file__).parent)
SHARD_BYTES = 64 << 10
SHARDS, STEPS = (8, 40), (5, 25)
_ON_THE_ROAD = 0.5  # a file counts from so many calls a shard and step on
_BESIDE = {"coordinate", "samples of this machine", "signs of life"}  # they see no shard: their calls go with the time


@dataclass
class Tally:
    """Calls by (thread, file), or seconds of processor by (thread, ""), of one process."""

    profiled: bool
    counts: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    _own: threading.local = field(default_factory=threading.local)

    def __enter__(self) -> Tally:
        self._run, tally = threading.Thread.run, self

        def run(self: threading.Thread) -> None:
            tally.watch(self.name, lambda: tally._run(self))

        threading.Thread.run = run  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        threading.Thread.run = self._run  # type: ignore[method-assign]

    def watch(self, name: str, body: Callable[[], Any]) -> Any:
        """Call `body` in this thread, and count what it does under a thread's `name` (digits are left out)."""
        files: Counter[str] = Counter()
        name = "".join(letter for letter in name.partition(":")[0] if not letter.isdigit()).strip(" -")
        self._own.files, before = files, time.thread_time()
        if self.profiled:
            sys.setprofile(self._called)
        try:
            return body()
        finally:
            sys.setprofile(None)
            spent = {"": time.thread_time() - before}
            for file, number in (files if self.profiled else spent).items():
                self.counts[name, file] += number

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._own.files[frame.f_code.co_filename] += 1


def train(job: Job, shards: int, steps: int) -> None:
    """A job of one replica whose model has one parameter for each shard, and next to nothing to compute."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(SHARD_BYTES // 4)) for _ in range(shards))
    run = job.train(
        model, [torch.ones(())] * 64, replicas=1, batch=1, steps=steps, optimizer=rp.SGD(lr=0.1),
        network=rp.Network(shard_bytes=SHARD_BYTES),
    )  # fmt: skip
    for micro in run:
        with micro:
            micro.backward(sum((part.sum() for part in model), torch.zeros(())) * micro.batch.sum())


def embedded(shards: int, steps: int, profiled: bool, servers: int = 2) -> dict[tuple[str, str], float]:
    """The tally of a worker, servers and a coordinator in this process. To two servers everything is sent."""
    with Tally(profiled) as tally:

        def play() -> None:
            with EmbeddedJob(servers=servers) as job:
                train(job, shards, steps)

        tally.watch("main", play)
    return dict(tally.counts)


alone = partial(embedded, servers=1)  # ``python train.py``: its server steps the model where it lies


def processes(shards: int, steps: int, profiled: bool) -> dict[tuple[str, str], float]:
    """The tally of a worker and a server, in processes of their own, over loopback."""
    cluster = _Cluster(1, 1, profiled=profiled)
    with cluster:
        (counted,) = cluster.run(_tallied, shards, steps, profiled)
        served = cluster.answer(cluster.served)
    return {(f"{who}: {thread}", file): n for who, own in (("worker", counted), ("server", served))
            for (thread, file), n in own.items()}  # fmt: skip


@dataclass(slots=True)
class _Cluster(ProcessCluster):
    profiled: bool = False
    served: Any = None

    def start(self, main: Callable[..., None], *args: Any) -> Any:
        if main is not server_main:
            return ProcessCluster.start(self, main, *args)
        self.served = ProcessCluster.start(self, _tallied_server, self.profiled, *args)
        return self.served


def _tallied(job: Job, shards: int, steps: int, profiled: bool) -> dict[tuple[str, str], float]:
    # The job's threads run already; those of its links and of the loop, which see shards, are started in `train`.
    with Tally(profiled) as tally:
        tally.watch("main", lambda: train(job, shards, steps))
        job.close()
    return dict(tally.counts)


def _tallied_server(pipe: Connection, token: str, profiled: bool, id: str, address: str) -> None:
    with Tally(profiled) as tally:
        tally.watch("main", lambda: run_servers([ServerService(id=id, coordinator=address, token=token)]))
    pipe.send(("value", dict(tally.counts)))


@dataclass(frozen=True)
class Road:
    """What a shard and step costs. `calls`, `cpu_us`: by thread; `files`: how many of the calls are into each file of
    the project, without files that have fewer than half a call."""

    calls: dict[str, float]
    files: dict[str, float]
    cpu_us: dict[str, float]

    @property
    def own_calls(self) -> float:
        """Calls of the project's own functions."""
        return sum(self.files.values())


def measure(play: Callable[[int, int, bool], dict[tuple[str, str], float]], repeats: int = 3) -> Road:
    """Play the jobs and take the differences; of processor time, the median of `repeats` (0: not measured)."""
    play(SHARDS[0], STEPS[0], False)  # what is imported at the first use is no part of the road
    counted = _differences(play, profiled=True)
    calls: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for (thread, file), number in counted.items():
        calls[thread] += number
        if file.startswith(HOME):
            files[file[len(HOME) + 1 :]] += number
    timed = [_differences(play, profiled=False) for _ in range(repeats)]
    threads = sorted({thread for one in timed for thread, _ in one})
    spent = {thread: statistics.median(one.get((thread, ""), 0.0) * 1e6 for one in timed) for thread in threads}
    road = {file: number for file, number in files.items() if number >= _ON_THE_ROAD}
    return Road({t: n for t, n in calls.items() if n >= _ON_THE_ROAD}, road, spent)


def _differences(
    play: Callable[[int, int, bool], dict[tuple[str, str], float]], *, profiled: bool
) -> dict[tuple[str, str], float]:
    few, many = SHARDS
    short, long = STEPS
    found = {(n, s): play(n, s, profiled) for n in SHARDS for s in STEPS}
    keys = {key for one in found.values() for key in one if key[0].rpartition(": ")[2] not in _BESIDE}
    parts = (many - few) * (long - short)
    signs = {(many, long): 1, (many, short): -1, (few, long): -1, (few, short): 1}
    return {key: sum(sign * found[job].get(key, 0.0) for job, sign in signs.items()) / parts for key in keys}


def report(title: str, road: Road) -> str:
    """A table of one kind of job."""
    own = f"{road.own_calls:.0f} of them through {len(road.files)} files of the project"
    calls, spent = sum(road.calls.values()), sum(road.cpu_us.values())
    rows = [f"{title}: {calls:.0f} calls, {own}, {spent:.0f} us of processor a shard and step"]
    for thread, number in sorted(road.calls.items(), key=lambda item: -item[1]):
        rows.append(f"  {thread:<28} {number:7.1f} calls {road.cpu_us.get(thread, 0.0):8.1f} us")
    return "\n".join(rows)


def main() -> None:
    """Measure these kinds of job and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there too, with the calls of each file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for title, play in (("in one process", embedded), ("alone", alone), ("a worker and a server", processes)):
        road = measure(play)
        figures[title] = road.__dict__
        print(report(title, road), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
