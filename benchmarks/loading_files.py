"""The same tars read by Rallypoint and by webdataset, which wrote them: rows of benchmarks/loading.py.

Each case reads one whole pass of 20,480 samples (32 floats and a number), shuffled, in batches of 64, in the process,
and then compares which samples have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from rallypoint.config import JobConfig
from rallypoint.data.loader import MicroBatches
from rallypoint.data.tars import WebDataset

SAMPLES, BATCH = 20_480, 64
Batches = Callable[[], Iterator[Any]]


def sample(index: int) -> dict[str, Any]:
    return {"x": np.full(32, index, "f4"), "y": index}


def decoded(found: dict[str, Any]) -> dict[str, Any]:
    """A sample of a tar's members."""
    return {"x": np.frombuffer(bytearray(found["x"]), "f4"), "y": int(found["y"])}


def ours(dataset: Any) -> Iterator[Any]:
    config = JobConfig(replicas=1, batch=BATCH, steps=SAMPLES // BATCH)
    batches = MicroBatches(dataset, config, torch.device("cpu"))
    return (batches.load(step, 0, 0) for step in range(config.steps))


def tars(folder: Path) -> tuple[Batches, Batches]:
    import webdataset

    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "%03d.tar"), maxcount=2048, verbose=0) as writer:
        for index in range(SAMPLES):
            row = sample(index)
            writer.write({"__key__": f"{index:06d}", "x": row["x"].tobytes(), "y": b"%d" % index})
    names = [str(path) for path in sorted(folder.glob("*.tar"))]

    def theirs() -> Iterator[Any]:
        read = webdataset.WebDataset(names, shardshuffle=len(names)).shuffle(1000).map(decoded)
        return iter(DataLoader(read, batch_size=BATCH))

    dataset = WebDataset(folder, transform=decoded)
    return lambda: ours(dataset), theirs


def rate(batches: Batches) -> float:
    """Samples a second of processor time, of one pass. Raises ValueError if it had other samples."""
    labels, begin = [], time.process_time()
    for batch in islice(batches(), SAMPLES // BATCH):
        labels.append(batch["y"])
    took = time.process_time() - begin
    if sorted(torch.cat(labels).tolist()) != list(range(SAMPLES)):
        raise ValueError("a pass had other samples than were written")
    return SAMPLES / took


def indexing(folder: Path) -> float:
    """Seconds of processor time to make the data set, which reads the tars once; theirs has nothing to read."""
    begin = time.process_time()
    WebDataset(folder, transform=decoded)
    return time.process_time() - begin


def cases(folder: Path) -> dict[str, Callable[[], float]]:
    """Write the files into this empty folder. Without webdataset there are none, and a sentence says so."""
    try:
        mine, theirs = tars(folder / "tars")
    except ImportError as error:
        print(f"tars: left out, the library that writes them cannot be imported ({error}): pip install webdataset")
        return {}
    return {
        "samples/s, tars: rallypoint": lambda: rate(mine), "samples/s, tars: webdataset": lambda: rate(theirs),
        "s before the first pass, tars: rallypoint": lambda: indexing(folder / "tars"),
    }  # fmt: skip
