"""Jobs under other policies than plain Sync: one that shows exactly what has been applied, and one that learns."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from jobs import _gpt, _gpt_loss

import rallypoint as rp
from rallypoint.worker.tensors import weights_hash

COUNTED_STEPS, COUNTED_REPLICAS = 12, 4


def counted() -> tuple[torch.nn.Module, Any]:
    """A model whose gradient does not depend on its weights: the end is the sum of what was applied, in any order.

    Small integers and powers of two, so that every sum is exact; no two contributions are alike.
    """
    torch.manual_seed(3)
    model = torch.nn.Linear(40, 3, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    return model, torch.utils.data.TensorDataset(torch.randint(-500, 500, (400, 3, 40)).float())


def train_counted(job: rp.Job, settings: dict[str, Any]) -> str:
    """The weights' hash after a job that ends with other weights if any contribution is lost or applied twice."""
    model, data = counted()
    common = {"replicas": COUNTED_REPLICAS, "batch": 2, "steps": COUNTED_STEPS, "network.shard_bytes": 128, "seed": 4}
    for micro in job.train(model, data, optimizer=rp.SGD(lr=0.5), **{**common, **settings}):
        with micro:
            micro.backward((model.weight * micro.batch[0]).sum())
    return weights_hash(model)


def train_evaluated(job: rp.Job, settings: dict[str, Any]) -> tuple[str, float, float]:
    """The weights' hash, and the loss over the whole dataset before and after."""
    model, data = _gpt()
    whole = data[:]
    before = _evaluate(model, whole)
    common = {"replicas": 4, "batch": 8, "steps": 40, "seed": 5, "network.shard_bytes": 16 << 10}
    for micro in job.train(model, data, optimizer=rp.Adam(lr=3e-3), **{**common, **settings}):
        with micro:
            micro.backward(_gpt_loss(model, micro.batch))
    return weights_hash(model), before, _evaluate(model, whole)


def _evaluate(model: torch.nn.Module, batch: Any) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(_gpt_loss(model, batch))
    model.train()
    return loss


def train_beside_a_slow_worker(job: rp.Job, quick: str, stuck_at: int) -> tuple[str, int]:
    """Worker 1 stands still in a step until worker 0 has come to the last one: hash, micro-batches here."""
    model, data = counted()
    steps, computed, ahead = 20, 0, Path(quick)
    run = job.train(
        model, data, replicas=4, batch=2, steps=steps, network=rp.Network(shard_bytes=128), sync=rp.Sync(quorum=2),
        optimizer=rp.SGD(lr=0.5),
    )  # fmt: skip
    for micro in run:
        with micro:
            while job.id == "worker1" and micro.step >= stuck_at and not ahead.exists():
                time.sleep(0.01)
            if job.id == "worker0" and micro.step == steps - 1:
                ahead.touch()
            micro.backward((model.weight * micro.batch[0]).sum())
            computed += 1
    return weights_hash(model), computed


def train_asleep_at_the_end(job: rp.Job, seconds: float) -> str:
    """Worker 1 is stopped for a while in the last step: once, although it has two replicas to compute."""
    model, data = counted()
    asleep = job.id == "worker1"
    for micro in job.train(
        model, data, replicas=4, batch=2, steps=6, network=rp.Network(shard_bytes=128), optimizer=rp.SGD(lr=0.5)
    ):
        with micro:
            if asleep and micro.step == 5:
                asleep = False
                alarm = subprocess.Popen(["sh", "-c", f"sleep {seconds} && kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
                alarm.wait()
            micro.backward((model.weight * micro.batch[0]).sum())
    return weights_hash(model)
