"""Models whose parameters are streamed, and a job for each: built alike in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rallypoint as rp
from rallypoint.worker.tensors import weights_hash


class Reads(nn.Module):
    """Tied weights, a parameter of another module, a parameter of its own, one that nobody uses, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.twin = nn.Linear(8, 8, bias=False)
        self.twin.weight = self.first.weight
        self.scale = nn.Parameter(torch.randn(8))
        self.never = nn.Linear(70, 3)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.twin(self.first(x))) * self.scale + self.frozen
        return self.last(F.linear(hidden, self.first.weight.t(), self.first.bias))


class Several(nn.Module):
    """What keeps parameters in unusual ways: attention, a recurrent layer, statistics, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 6, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x[:, None, :])))
        mixed, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.last(self.recurrent(mixed)[0][:, -1])


class Again(nn.Module):
    """One block that runs several times in a forward pass, inside of others."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(self.block(x))
        return self.last(x)


@dataclass(frozen=True)
class Case:
    """A model, and settings beside the common ones."""

    build: Callable[[], nn.Module]
    settings: dict[str, Any]


CASES = {
    "reads": Case(Reads, {}),
    "several": Case(Several, {"clip": 0.3}),
    "again": Case(Again, {"groups": (rp.Group(match=("last.*",), lr_scale=0.1),)}),
    "again, blocks twice": Case(Again, {"memory.recompute": "blocks"}),
    "again, one parameter ahead": Case(Again, {"memory.prefetch_bytes": 0}),
}
COMMON: dict[str, Any] = {
    "replicas": 3, "batch": 4, "steps": 6, "seed": 5, "network.shard_bytes": 256, "memory.prefetch_bytes": 1000,
    "optimizer": rp.AdamW(lr=1e-2),
}  # fmt: skip
DATA = torch.utils.data.TensorDataset(
    torch.randn(40, 8, generator=torch.Generator().manual_seed(3)),
    torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(4)),
)


def build(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return case.build()


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def train(job: rp.Job, model: nn.Module, settings: dict[str, Any], **more: Any) -> dict[Any, Any]:
    """The losses by (step, replica); on the worker that evaluates, by step: the loss in eval mode, and all weights."""
    found: dict[Any, Any] = {}
    run = job.train(model, DATA, **{**COMMON, **settings}, **more)

    @run.every(3)
    def evaluate(step: int) -> dict[str, float]:
        found[step] = float(loss_of(model, DATA[:])), weights_hash(model)
        return {"loss": found[step][0]}

    for micro in run:
        with micro:
            loss = loss_of(model, micro.batch)
            found[micro.step, micro.replica] = float(loss.detach())
            micro.backward(loss)
    return found


def train_case(job: rp.Job, name: str, settings: dict[str, Any]) -> dict[Any, Any]:
    """On a worker of a real cluster."""
    return train(job, build(CASES[name]), {**CASES[name].settings, **settings})
