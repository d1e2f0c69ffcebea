"""One worker of `benchmarks/reduce.py`: synchronises K bytes again and again, and writes when each time was over."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from cluster import finish, join_gloo
from rallypoint.config import record_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import Sync
from rallypoint.core.protocol import Report
from rallypoint.core.worker.slots import Compute, Install, UploadFirst
from rallypoint.launch import environment
from rallypoint.launch.access import access_of
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.loop.session import Job

Optimizer = Literal["sgd", "adamw", "fused"]  # fused: AdamW by torch's fused kernel
SETTINGS: dict[Optimizer, dict[str, Any]] = {
    "sgd": {"type": "sgd", "lr": 0.01}, "adamw": {"type": "adamw", "lr": 0.01},
    "fused": {"type": "adamw", "lr": 0.01, "fused": True},
}  # fmt: skip


class Task(msgspec.Struct, frozen=True):
    """What to do: `steps` synchronisations of `words` fp32 words with `workers` workers."""

    design: Literal["rallypoint", "gloo", "gloo-step"]
    rank: int
    workers: int
    words: int
    steps: int
    shard_bytes: int
    window: int
    hold_bytes: int
    in_flight_bytes: int
    pace_mbit: float = 0.0
    pacing: Literal["auto", "off"] = "auto"
    tune: Literal["off", "auto"] = "off"
    optimizer: Optimizer = "sgd"
    quorum: int | None = None  # of the workers' contributions
    weighted: bool = False  # every replica has another weight, so that sums are rounded
    milestone: tuple[int, str] | None = None  # (version, path): touch this file when that version is here


class Result(msgspec.Struct, frozen=True):
    """When this worker was ready to begin, and when it held each version (seconds, monotonic)."""

    finishes: list[float]
    sha256: str = ""  # of what is here at the end; only of a `weighted` task


def rallypoint(task: Task) -> Result:
    """Through the product's data plane: push every shard, receive every version."""
    config = resolve({
        "replicas": task.workers, "steps": task.steps, "optimizer": SETTINGS[task.optimizer],
        "nonfinite": "continue", "network.shard_bytes": task.shard_bytes, "network.window": task.window,
        "network.hold_bytes": task.hold_bytes, "network.in_flight_bytes": task.in_flight_bytes,
        "sync": Sync(quorum=task.quorum),
        "network.pace_mbit": task.pace_mbit, "network.pacing": task.pacing, "tune": task.tune,
    })  # fmt: skip
    layout = build_layout([TensorSpec("gradient", (task.words,), "float32", 0)], config.network.shard_bytes)
    record = record_of(config, layout)
    access = access_of(role="worker")
    with Job(
        id=os.environ[environment.ID], coordinator=os.environ[environment.COORDINATOR],
        token=access.token, transport=access.transport, near=os.environ.get(environment.NEAR, ""),
    ) as job:  # fmt: skip
        exchange = job.open_exchange(record, config)
        finishes = _exchange_all(job, exchange, task)
        whole = exchange.buffer[: layout.words].numpy().tobytes() if task.weighted else b""
        return Result(finishes, hashlib.sha256(whole).hexdigest() if task.weighted else "")


def _exchange_all(job: Job, exchange: Exchange, task: Task) -> list[float]:
    """What `Run` does, without a model; when each version was here."""
    finishes: list[float] = []
    while (action := exchange.next_action()) is not None:
        match action:
            case UploadFirst():
                exchange.initialise(lambda start, stop: torch.ones(stop - start))
            case Install(version=version):
                if exchange.begin_install(version) is None:
                    continue
                generation = exchange.installed(version)
                finishes.append(time.monotonic())
                if task.milestone is not None and version == task.milestone[0]:
                    Path(task.milestone[1]).touch()
                if version == task.steps and generation is not None:
                    job.done(generation)
            case Compute(step=step, replica=replica):
                if exchange.replica.begin(step, replica) is None:
                    continue
                if task.weighted:
                    exchange.replica.weigh(1.0 + replica / 7, finite=True)
                for shard in range(len(exchange.layout.shards)):
                    if exchange.replica.claim(shard):  # the slot still holds the parameters: as good a gradient as any
                        exchange.replica.filled(shard)
                exchange.replica.computed()
                if task.tune == "auto":  # the coordinator tunes by the times of reports
                    job._link.send(Report(step, replica, 0.0, 1.0, 0, generation=exchange.view.generation))
    return finishes


def gloo(task: Task) -> Result:
    """The peer: one all_reduce of the whole vector, in place; `gloo-step`: and then torch's step, on each worker."""
    join_gloo(task.rank, task.workers)
    gradient = torch.zeros(task.words)
    parameters = [torch.nn.Parameter(part) for part in torch.split(torch.ones(task.words), 1 << 20)]
    for parameter, part in zip(parameters, torch.split(gradient, 1 << 20), strict=True):
        parameter.grad = part
    own: dict[Optimizer, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.01), "adamw": lambda: torch.optim.AdamW(parameters),
        "fused": lambda: torch.optim.AdamW(parameters, fused=True),
    }  # fmt: skip
    optimizer = own[task.optimizer]() if task.design == "gloo-step" else None
    dist.barrier()
    finishes = [time.monotonic()]
    for _ in range(task.steps):
        dist.all_reduce(gradient)
        if optimizer is not None:
            gradient.div_(task.workers)
            optimizer.step()
        finishes.append(time.monotonic())
    dist.barrier()
    return Result(finishes)


def main() -> None:
    """Do the task in argv[1]."""
    hold_lifeline()
    task = msgspec.json.decode(sys.argv[1], type=Task)
    torch.set_num_threads(1)
    finish((rallypoint if task.design == "rallypoint" else gloo)(task))


if __name__ == "__main__":
    main()
