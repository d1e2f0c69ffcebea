"""How fast samples are loaded, how long a loop waits for them, and how long a resume takes to find its place.

    python benchmarks/loading.py [--rounds 5] [--only TEXT] [--json FILE]

`--only rows` measures the cases with that in their name.

1. Samples a second of processor time, on one core in the process: ours by position beside torch's DataLoader and
   torchdata's StatefulDataLoader (`pip install torchdata`; left out where it is not), in turn.
2. A loop that computes 80 ms a micro-batch of 16 samples, with a transform that waits 5 ms a sample (as a disk or a
   decoder on another core would): the share of its time for which the loop waits, without and with loader processes,
   beside torch's DataLoader.
3. Tars, read by us and by webdataset (`loading_files.py`), where it is installed.
4. The time to the first micro-batch at a step far into a data set of 10^9 samples, and at step 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import loading_files
from rallypoint.config import JobConfig
from rallypoint.data.loader import MicroBatches
from rallypoint.data.order import places_from
from rallypoint.data.processes import LoaderProcesses
from rallypoint.data.spec import Loader

CPU = torch.device("cpu")
SAMPLES, BATCH = 40_960, 64
COMPUTE_S, TRANSFORM_S, OF_LOOP, MICROS = 0.08, 0.005, 16, 60


class Rows:
    """100,000 rows of 32 floats and a label, in memory."""

    def __init__(self) -> None:
        self.x, self.y = np.random.rand(100_000, 32).astype("f4"), np.arange(100_000)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Numbers:
    """Each sample is its index."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Slow(Numbers):
    """A sample needs a while."""

    def __getitem__(self, index: int) -> int:
        time.sleep(TRANSFORM_S)
        return index


def batches_of(dataset: Any, batch: int, **settings: Any) -> MicroBatches:
    config = JobConfig(replicas=4, batch=batch, steps=10**9)
    return MicroBatches(dataset, config, CPU, loader=Loader(**settings))


def ours(dataset: Any) -> Iterator[Any]:
    batches = batches_of(dataset, BATCH)
    return (batches.load(step, 1, 0) for step in range(10**9))


def loaders() -> dict[str, Callable[[Any], Iterator[Any]]]:
    found: dict[str, Callable[[Any], Iterator[Any]]] = {
        "rallypoint": ours,
        "DataLoader": lambda dataset: iter(DataLoader(dataset, batch_size=BATCH, shuffle=True)),
    }
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return found
    found["StatefulDataLoader"] = lambda dataset: iter(StatefulDataLoader(dataset, batch_size=BATCH, shuffle=True))
    return found


def rate(batches: Iterator[Any]) -> float:
    """Samples a second of processor time, after the first batches."""
    for _ in islice(batches, 3):
        pass
    begin = time.process_time()
    for _ in islice(batches, SAMPLES // BATCH):
        pass
    return SAMPLES / (time.process_time() - begin)


def waiting(loaded: Iterator[Any]) -> float:
    """The share of the loop's time for which it waits for micro-batches, once it runs."""
    waited, begin = 0.0, 0.0
    for index in range(MICROS):
        asked = time.perf_counter()
        next(loaded)
        if index == MICROS // 3:  # processes have started, and the depth has adapted
            waited, begin = 0.0, time.perf_counter()
        elif index > MICROS // 3:
            waited += time.perf_counter() - asked
        time.sleep(COMPUTE_S)
    return waited / (time.perf_counter() - begin)


def by_processes(workers: int) -> float:
    processes = LoaderProcesses(batches_of(Slow(10**6), OF_LOOP, workers=workers), print)

    def loaded() -> Iterator[Any]:
        for place in places_from(0, 1, (1,), JobConfig(replicas=4, batch=OF_LOOP, steps=10**9)):
            processes.expect(place[0], place[1], (1,))
            yield processes.take(place)

    try:
        return waiting(loaded())
    finally:
        processes.close()


def alone() -> float:
    batches = batches_of(Slow(10**6), OF_LOOP)
    return waiting(batches.load(step, 1, 0) for step in range(10**9))


def torchs(workers: int) -> float:
    return waiting(iter(DataLoader(Slow(10**6), batch_size=OF_LOOP, shuffle=True, num_workers=workers)))  # type: ignore[arg-type]


def first(step: int) -> float:
    """Seconds from nothing to the first micro-batch at this step."""
    begin = time.perf_counter()
    batches_of(Numbers(10**9), BATCH).load(step, 1, 0)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Callable[[], float]] = {}
    rows = Rows()
    kinds: dict[str, Any] = {
        "rows": rows, "TensorDataset": TensorDataset(torch.from_numpy(rows.x), torch.from_numpy(rows.y)),
        "list of dicts": [{"x": x, "y": y} for y, x in enumerate(rows.x)],
        "list of (tensor, int)": [(x, y) for y, x in enumerate(torch.from_numpy(rows.x).unbind())],
        "numbers": Numbers(10**6),
    }  # fmt: skip
    for kind, dataset in kinds.items():
        for name, make in loaders().items():
            cases[f"samples/s, {kind}: {name}"] = lambda make=make, dataset=dataset: rate(make(dataset))  # type: ignore[misc]
    cases["loop waits, % of its time: rallypoint, no processes"] = lambda: 100 * alone()
    for workers in (1, 2, 4):
        cases[f"loop waits, %: rallypoint, {workers} processes"] = lambda workers=workers: 100 * by_processes(workers)  # type: ignore[misc]
        cases[f"loop waits, %: DataLoader, {workers} processes"] = lambda workers=workers: 100 * torchs(workers)  # type: ignore[misc]
    cases["first micro-batch of 10^9 samples, ms: step 0"] = lambda: 1e3 * first(0)
    cases["first micro-batch of 10^9 samples, ms: step 3,900,000"] = lambda: 1e3 * first(3_900_000)
    with tempfile.TemporaryDirectory() as folder:
        cases |= loading_files.cases(Path(folder))
        cases = {name: measure for name, measure in cases.items() if options.only in name}
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, measure in cases.items():
                found[name].append(measure())
    for name, values in found.items():
        print(f"{name:58s} {statistics.median(values):12,.1f}  [{min(values):,.1f} .. {max(values):,.1f}]", flush=True)
    if options.json:
        results = [{"case": name, "all": values} for name, values in found.items()]
        options.json.write_text(json.dumps({"machine": {"cores": os.cpu_count()}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
