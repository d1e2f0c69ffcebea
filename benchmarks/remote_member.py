"""The worker of `remote.py`: reads a data set through a job, some passes long."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import urllib.request

import msgspec
import torch

import rallypoint as rp
from cluster import finish
from rallypoint.config import JobConfig
from rallypoint.data.loader import MicroBatches


class Task(msgspec.Struct, frozen=True):
    """What to read, and how."""

    urls: tuple[str, ...]
    cache: str
    steps: int
    replicas: int
    batch: int
    processes: int
    figures: str
    options: dict[str, str]
    mixed: int = 8


class Result(msgspec.Struct, frozen=True):
    """Unix times of the loop's begin, of its first micro-batch and of its end; a digest of the weights; seconds to make
    the data set, and to the first micro-batch of a resume in the middle, by this worker and then; bytes that the store
    had sent when the job was over."""

    began: float
    first: float
    ended: float
    digest: str
    made: float
    resumed: float
    sent: int


def data_of(task: Task) -> rp.Parquet:
    """The data set."""
    cache = rp.Cache(task.cache) if task.cache else None
    return rp.Parquet(list(task.urls), transform=lambda row: torch.frombuffer(bytearray(row["x"]), dtype=torch.uint8),
                      cache=cache, storage_options=task.options)  # fmt: skip


def main(task: Task) -> None:
    """Train, on next to nothing."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1)
    before = time.monotonic()
    data = data_of(task)
    made = time.monotonic() - before
    with rp.join() as job:
        run = job.train(
            model, data, replicas=task.replicas, batch=task.batch, steps=task.steps,
            reading=rp.Reading(order="windowed", mixed_shards=task.mixed), optimizer=rp.SGD(lr=0.001),
            loader=rp.Loader(workers=task.processes),
        )  # fmt: skip
        began, first = time.time(), 0.0
        for micro in run:
            first = first or time.time()
            with micro:
                micro.backward(model(micro.batch[:, :64].float() / 256).pow(2).mean())
        ended = time.time()
        with urllib.request.urlopen(task.figures) as answer:
            sent = int(json.load(answer)["sent"])
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    before = time.monotonic()
    config = JobConfig(
        replicas=task.replicas, batch=task.batch, steps=task.steps,
        reading=rp.Reading(order="windowed", mixed_shards=task.mixed)
    )
    MicroBatches(data_of(task), config, torch.device("cpu")).load(task.steps // 2, 1, 0)
    finish(Result(began, first, ended, digest, made, time.monotonic() - before, sent))


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Task))
