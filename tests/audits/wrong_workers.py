"""A job in which some workers compute something else from some step on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import rallypoint as rp
from rallypoint.worker.tensors import weights_hash
from support.wrong import WrongComputation

SETTINGS: dict[str, Any] = {
    "replicas": 6, "batch": 4, "steps": 8, "seed": 3, "network.shard_bytes": 256, "clip": 1.0, "audit.share": 1.0,
    "optimizer": {"type": "adamw", "lr": 0.01},
}  # fmt: skip


def net() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(9)
    return torch.utils.data.TensorDataset(
        torch.randn(60, 6, generator=generator), torch.randn(60, 3, generator=generator)
    )


def train(job: rp.Job, wrong: dict[str, str], first: int, settings: dict[str, Any]) -> str:
    """Train; the workers named in `wrong` (worker -> kind) compute something else from step `first` on. Returns the
    hash of the weights at the end."""
    model = net()
    run = job.train(model, data(), **{**SETTINGS, **settings})
    error = WrongComputation(wrong[job.id], model[2].weight) if job.id in wrong else None
    for micro in run:
        with micro, nullcontext() if error is None else error.computing(micro.step >= first):
            x, y = micro.batch if error is None else map(error.batch, micro.batch)
            micro.backward(torch.nn.functional.mse_loss(model(x).float(), y))
    return weights_hash(model)
