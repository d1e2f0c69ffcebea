"""Jobs with tables, and the same in one process with plain PyTorch: a sparse embedding under torch's own optimizers."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import rallypoint as rp
from rallypoint.config import JobConfig, resolve
from rallypoint.core.order import derive_seed
from rallypoint.core.schedule import rate_at
from rallypoint.core.shard.clip import clip_scale
from rallypoint.data.loader import MicroBatches
from rallypoint.data.randomness import seed_everything
from rallypoint.net.channel import SEALED_BYTES, Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.server.rows import first_rows

USERS, ITEMS, COLUMNS = 700, 50, 6
SETTINGS: dict[str, Any] = {"replicas": 3, "batch": 12, "steps": 30, "seed": 4, "network.shard_bytes": 4 << 10}


class Clicks(torch.nn.Module):
    """Two tables and a small network on top; `items` is looked up twice."""

    def __init__(self, users: int = USERS, items: int = ITEMS, *, device: str = "meta") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.top = torch.nn.Sequential(torch.nn.Linear(3 * COLUMNS, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
        on_servers = device == "meta"
        self.users = torch.nn.Embedding(users, COLUMNS, sparse=on_servers, device=device)
        self.items = torch.nn.Embedding(items, COLUMNS, sparse=on_servers, device=device)

    def forward(self, user: torch.Tensor, item: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        rows = [self.users(user), self.items(item), self.items(before).mean(1)]
        return self.top(torch.cat(rows, 1)).squeeze(1)


def clicks(users: int = USERS, items: int = ITEMS, *, samples: int = 400) -> torch.utils.data.TensorDataset:
    """User, item, the two items before, clicked; half of the clicks are on one item in ten."""
    generator = torch.Generator().manual_seed(8)

    def draw(rows: int, *shape: int) -> torch.Tensor:
        popular = torch.randint(0, max(1, rows // 10), shape, generator=generator)
        anyone = torch.randint(0, rows, shape, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < 0.5, popular, anyone)

    clicked = torch.rand(samples, generator=generator).round()
    return torch.utils.data.TensorDataset(draw(users, samples), draw(items, samples), draw(items, samples, 2), clicked)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    user, item, before, clicked = batch
    return F.binary_cross_entropy_with_logits(model(user, item, before), clicked)


def train(job: rp.Job, settings: dict[str, Any], users: int = USERS, items: int = ITEMS) -> dict[str, Any]:
    """Train on one worker: the whole state as numpy arrays (on whoever leads), the losses seen here, frames' bytes."""
    model, seen = Clicks(users, items), _Wire()
    state: dict[str, Any] = {}
    losses: dict[tuple[int, int], float] = {}
    run = job.train(model, clicks(users, items), **{**SETTINGS, **settings})

    @run.every(run.config.steps)
    def look(step: int) -> None:
        seen.step = 0  # what an evaluation pulls is its own affair
        state.update(whole(model))

    for micro in run:
        with micro:
            seen.step = micro.step
            loss = loss_of(model, micro.batch)
            losses[micro.step, micro.replica] = float(loss.detach())
            micro.backward(loss, weight=1.0 + 0.25 * micro.replica)
    return {"state": state, "losses": losses, "bytes": seen.bytes}


@torch.no_grad()
def whole(model: Clicks) -> dict[str, Any]:
    """Every parameter by name; of tables all rows, pulled."""
    state = {name: p.numpy().copy() for name, p in model.named_parameters() if not p.is_meta}
    for name, table in (("users", model.users), ("items", model.items)):
        state[f"{name}.weight"] = table(torch.arange(table.num_embeddings)).numpy().copy()
    return state


class _Wire:
    """Bytes of the frames that crossed this process's links, by kind, in steps after the first."""

    def __init__(self) -> None:
        self.step, self.bytes = 0, {}
        send, receive = Channel.send, Channel.receive_header

        def counted_send(channel: Channel, header: Header, *args: Any, **kwargs: Any) -> None:
            self._count(header)
            send(channel, header, *args, **kwargs)

        def counted_receive(channel: Channel) -> Header:
            header = receive(channel)
            self._count(header)
            return header

        setattr(Channel, "send", counted_send)  # noqa: B010 - this process is only this job's
        setattr(Channel, "receive_header", counted_receive)  # noqa: B010

    bytes: dict[str, int]

    def _count(self, header: Header) -> None:
        if self.step > 0 and header.kind in (Kind.PUSH, Kind.VERSION, Kind.PULL_ROWS, Kind.ROWS):
            name = header.kind.name
            self.bytes[name] = self.bytes.get(name, 0) + header.length + SEALED_BYTES


class Reference:
    """The job in one process: replicas one after another, summed in order, torch's own optimizers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.config: JobConfig = resolve({**SETTINGS, **settings})
        self.model = Clicks(device="cpu")
        for name, table in (("users", self.model.users), ("items", self.model.items)):
            rows = np.arange(table.num_embeddings)
            first = first_rows(self.config.seed, f"{name}.weight", rows, COLUMNS, self.config.table_std)
            table.weight.data.copy_(torch.from_numpy(first))
        self.tables = [self.model.users.weight, self.model.items.weight]
        dense = list(self.model.top.parameters())
        spec = self.config.optimizer
        if isinstance(spec, rp.SGD):
            self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD([*self.tables, *dense])]
        elif isinstance(spec, rp.Adagrad):
            self.optimizers = [torch.optim.Adagrad([*self.tables, *dense], lr_decay=spec.lr_decay, eps=spec.eps)]
        else:
            self.optimizers = [
                torch.optim.SparseAdam(self.tables, betas=spec.betas, eps=spec.eps),
                torch.optim.AdamW(dense, betas=spec.betas, eps=spec.eps, weight_decay=0.0),
            ]
        self.batches = MicroBatches(clicks(), self.config, torch.device("cpu"))

    def train(self) -> dict[str, Any]:
        losses = {}
        for step in range(self.config.steps):
            for replica in range(self.config.replicas):
                losses[step, replica] = self._replica(step, replica)
            self._update(step)
        return {"state": {n: p.detach().numpy().copy() for n, p in self.model.named_parameters()}, "losses": losses}

    def _replica(self, step: int, replica: int) -> float:
        if replica == 0:
            self._sums: dict[str, torch.Tensor] = {}
        losses = []
        for micro in range(self.config.accumulate):
            batch = self.batches.load(step, replica, micro)
            seed_everything(derive_seed(self.config.seed, "compute", step, replica, micro))
            loss = loss_of(self.model, batch)
            losses.append(float(loss.detach()))
            (loss / self.config.accumulate).backward()
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad * (1.0 + 0.25 * replica)
            self._sums[name] = self._sums[name] + gradient if replica else gradient
            parameter.grad = None
        return losses[-1]

    @torch.no_grad()
    def _update(self, step: int) -> None:
        total = sum(1.0 + 0.25 * replica for replica in range(self.config.replicas))
        for gradient in self._sums.values():
            gradient.mul_(1.0 / total)
        norm = math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in self._sums.values()))
        scale = clip_scale(norm, self.config.clip)
        for name, parameter in self.model.named_parameters():
            gradient = self._sums[name] * scale
            sparse = any(parameter is table for table in self.tables)
            parameter.grad = gradient.to_sparse(1) if sparse else gradient
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(self.config.schedule, step, self.config.steps)
            optimizer.step()
        self.model.zero_grad()


def reference(settings: dict[str, Any]) -> dict[str, Any]:
    """What plain PyTorch makes of the job."""
    return copy.deepcopy(Reference(settings).train())
