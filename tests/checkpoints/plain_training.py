"""Training as plain PyTorch does it, and its checkpoints; jobs of the tests have the same model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import rallypoint as rp

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
BATCH, STEPS, FIRST = 8, 6, 3


class Net(torch.nn.Module):
    """Parameters that are cut into several shards, BatchNorm's buffers, a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(6, 24)
        self.norm = torch.nn.BatchNorm1d(24)
        self.back = torch.nn.Linear(24, 6)
        self.again = torch.nn.Linear(6, 24, bias=False)
        self.again.weight = self.stem.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.norm(torch.tanh(self.again(x) + self.stem.bias)))


def build() -> Net:
    torch.manual_seed(4)
    return Net()


def data() -> torch.Tensor:
    return torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(5))


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch).square().mean()


OPTIMIZERS = {
    "adamw": (rp.AdamW(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "momentum": (rp.SGD(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
}  # fmt: skip


def settings(kind: str, **more: Any) -> dict[str, Any]:
    mine: dict[str, Any] = {
        "replicas": 1, "batch": BATCH, "steps": STEPS, "reading.order": "sequential", "optimizer": OPTIMIZERS[kind][0],
        "decay_1d": True, "network.shard_bytes": 256,
    }  # fmt: skip
    return mine | more


def plain(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The ordinary loop."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, data()[step * BATCH : (step + 1) * BATCH]).backward()
        optimizer.step()


def undisturbed(optimizer: str) -> Net:
    """All steps of plain training."""
    model = build()
    plain(model, OPTIMIZERS[optimizer][1](model.parameters()), range(STEPS))
    return model


def half_way(optimizer: str, folder: Path, options: StateDictOptions | None = BY_NAME) -> None:
    """The first steps of plain training, as a checkpoint."""
    model = build()
    stepping = OPTIMIZERS[optimizer][1](model.parameters())
    plain(model, stepping, range(FIRST))
    weights, state = get_state_dict(model, stepping, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)


def going_on(optimizer: str, folder: Path, steps: range) -> Net:
    """Plain training that goes on from a checkpoint."""
    model = build()
    stepping = OPTIMIZERS[optimizer][1](model.parameters())
    weights, state = get_state_dict(model, stepping, options=BY_NAME)
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, stepping, model_state_dict=weights, optim_state_dict=content["optimizer"], options=BY_NAME)
    plain(model, stepping, steps)
    return model


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Both have the same bytes."""
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
