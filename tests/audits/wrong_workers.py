"""A job in which one worker computes something else from some step on, in one of four ways."""

from __future__ import annotations

from typing import Any

import torch

import rallypoint as rp
from rallypoint.worker.tensors import weights_hash

SETTINGS: dict[str, Any] = {
    "replicas": 6, "batch": 4, "steps": 8, "seed": 3, "shard_bytes": 256, "clip": 1.0, "audit": 1.0,
    "optimizer": {"type": "adamw", "lr": 0.01},
}  # fmt: skip
KINDS = ("bit", "scale", "sample", "kernel")


def net() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(9)
    return torch.utils.data.TensorDataset(
        torch.randn(60, 6, generator=generator), torch.randn(60, 3, generator=generator)
    )


def flipped(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with one bit of one value flipped, the lowest of its mantissa."""
    wrong = gradient.clone()
    wrong.view(-1).view(torch.int32)[0] ^= 1
    return wrong


def train(job: rp.Job, wrong: dict[str, str], first: int, settings: dict[str, Any]) -> str:
    """Train; the workers named in `wrong` (worker -> kind) compute something else from step `first` on. Returns the
    hash of the weights at the end."""
    model, kind = net(), wrong.get(job.id, "")
    run = job.train(model, data(), **{**SETTINGS, **settings})
    now = [False]
    weight = model[2].weight
    if kind == "bit":
        weight.register_hook(lambda gradient: flipped(gradient) if now[0] else gradient)
    elif kind == "scale":
        weight.register_hook(lambda gradient: gradient * 1.001 if now[0] else gradient)
    for micro in run:
        with micro:
            now[0] = kind != "" and micro.step >= first
            x, y = micro.batch
            if now[0] and kind == "sample":
                x, y = torch.cat([x[1:], x[1:2]]), torch.cat([y[1:], y[1:2]])
            if now[0] and kind == "kernel":
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(x).float()
            else:
                out = model(x)
            micro.backward(torch.nn.functional.mse_loss(out, y))
    return weights_hash(model)
