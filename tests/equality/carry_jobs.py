"""Jobs whose replicas carry a state from step to step, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rallypoint as rp
from rallypoint.core.order import SampleOrder, derive_seed
from rallypoint.data.randomness import seed_everything
from rallypoint.testing.reference import tree_sum
from rallypoint.worker.tensors import weights_hash

SEED, BATCH, WINDOW, WORDS, STEPS = 4, 3, 5, 13, 12
Hidden = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A small LSTM language model, with dropout: tokens (BATCH, WINDOW) to logits, and the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.embedding, self.dropout = nn.Embedding(WORDS, 8), nn.Dropout(0.2)
        self.recurrent, self.out = nn.LSTM(8, 8, num_layers=2, batch_first=True), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.recurrent(self.dropout(self.embedding(tokens)), hidden)
        return self.out(self.dropout(output)), hidden


def first_hidden() -> Hidden:
    return torch.zeros(2, BATCH, 8), torch.zeros(2, BATCH, 8)


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (700,), generator=torch.Generator().manual_seed(9))


def lanes(replicas: int) -> rp.Lanes:
    return rp.Lanes(tokens(), WINDOW, lanes=replicas * BATCH)


def settings_of(replicas: int, **changes: Any) -> dict[str, Any]:
    return {
        "replicas": replicas, "batch": BATCH, "steps": STEPS, "seed": SEED, "network.shard_bytes": 512,
        "optimizer": rp.SGD(lr=0.5), **changes,
    }  # fmt: skip


def train_carrying(job: rp.Job, replicas: int, changes: dict[str, Any] | None = None) -> str:
    """The weights' hash on one worker of a real cluster."""
    model, data = Net(), lanes(replicas)
    for micro in job.train(model, data, carry=first_hidden(), **settings_of(replicas, **(changes or {}))):
        with micro:
            x, y = micro.batch
            hidden = first_hidden() if data.begins(micro.step) else micro.carry
            output, hidden = model(x, hidden)
            micro.carry = hidden
            micro.backward(F.cross_entropy(output.flatten(0, 1), y.flatten()))
    return weights_hash(model)


def plain_hash(replicas: int, *, clear: bool = False) -> str:
    """The loop of pytorch/examples' word_language_model, over `replicas` of them. `clear`: nothing is carried."""
    model, data = Net(), lanes(replicas)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    order = SampleOrder(seed=SEED, samples=len(data), replicas=replicas, batch=BATCH, shuffled=False)
    carried = [first_hidden() for _ in range(replicas)]
    for step in range(STEPS):
        gradients = []
        for replica in range(replicas):
            model.zero_grad()
            seed_everything(derive_seed(SEED, "compute", step, replica, 0))
            samples = [data[index] for index in order.samples(step, replica)]
            x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
            hidden = first_hidden() if clear or data.begins(step) else carried[replica]
            output, hidden = model(x, tuple(part.detach() for part in hidden))
            carried[replica] = hidden
            F.cross_entropy(output.flatten(0, 1), y.flatten()).backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, of_replicas in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = tree_sum(of_replicas) * (1.0 / replicas)
        optimizer.step()
    return weights_hash(model)
