"""Plain loops that stay their own, and the same training in one process of plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import rallypoint as rp
from rallypoint.bridges.wrap import wrap_in
from rallypoint.testing.reference import tree_sum
from rallypoint.worker.tensors import weights_hash

STEPS, BATCH = 12, 4


class Net(torch.nn.Module):
    """Two layers, and statistics between them."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(6, 10), torch.nn.Linear(10, 3)
        self.norm = torch.nn.BatchNorm1d(10) if norm else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def loss_of(model: torch.nn.Module, step: int, replica: int) -> torch.Tensor:
    """The loss of the loop's own batch: what it is follows from the step and the replica."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    x, y = torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)
    return torch.nn.functional.mse_loss(model(x), y)


def build(kind: str, model: torch.nn.Module) -> tuple[Any, torch.optim.lr_scheduler.LRScheduler | None]:
    """The optimizer of a wrapped loop, and its schedule."""
    if kind == "servers":
        return rp.AdamW(lr=0.02), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)


def train_wrapped(job: rp.Job, kind: str, replicas: int, norm: bool = False) -> tuple[int, str]:
    """A script's loop. Returns which replica it was, and the weights' hash."""
    model = Net(norm)
    optimizer, schedule = build(kind, model)
    optimizer = wrap_in(job, model, optimizer, steps=STEPS, schedule=schedule, replicas=replicas, decay_1d=True)
    for step in range(optimizer.position, STEPS):
        loss = loss_of(model, step, optimizer.replica)
        loss.backward()
        optimizer.log(loss)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return optimizer.replica, weights_hash(model)


def train_plain(kind: str, replicas: int) -> str:
    """The same in one process, without Rallypoint: the mean of the replicas' gradients."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5) if kind == "workers" else None
    parameters = list(model.parameters())
    for step in range(STEPS):
        parts = [torch.autograd.grad(loss_of(model, step, replica), parameters) for replica in range(replicas)]
        for parameter, *own in zip(parameters, *parts, strict=True):
            parameter.grad = tree_sum(list(own)) * (1.0 / replicas)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return weights_hash(model)
