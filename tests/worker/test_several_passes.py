"""Several backward passes of one micro-batch: what a loop may do, and the sentences that refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rallypoint as rp
from rallypoint.core.order import SampleOrder
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.tensors import weights_hash

VALUES = torch.linspace(-1, 1, 96).view(32, 3)
DATA = torch.utils.data.TensorDataset(VALUES)
Body = Callable[[rp.Micro, nn.Module], None]


def parts(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = model(batch)
    return out.square().mean(), model(batch * 2).abs().mean(), out.sum() * 0.1


def loop(body: Body, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    with EmbeddedJob() as job:
        for micro in job.train(model, DATA, **{"batch": 4, "steps": 3, "optimizer": rp.SGD(lr=0.1), **settings}):
            with micro:
                body(micro, model)
    return model


@pytest.mark.parametrize("settings", [
    {}, {"accumulate": 2}, {"replicas": 2}, {"sync": rp.LocalSteps(steps=3, outer=rp.SGD(lr=1.0))},
    {"sync": rp.AllReduce()},
], ids=["one", "accumulated", "two replicas", "local steps", "all-reduce"])  # fmt: skip
def test_several_backward_passes_add_up_as_in_plain_pytorch(settings: dict[str, Any]) -> None:
    def several(micro: rp.Micro, model: nn.Module) -> None:
        first, second, third = parts(model, micro.batch[0])
        micro.backward(first, more=True, retain_graph=True)
        micro.backward(second, more=True)
        micro.backward(third)

    found = loop(several, **settings)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    replicas, cuts = settings.get("replicas", 1), settings.get("accumulate", 1)
    order = SampleOrder(seed=0, samples=32, replicas=replicas, batch=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        gradients = []
        for replica in range(replicas):
            model.zero_grad()
            for batch in VALUES[order.samples(step, replica)].chunk(cuts):
                first, second, third = parts(model, batch)
                (first / cuts).backward(retain_graph=True)
                (second / cuts).backward()
                (third / cuts).backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, of in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = (of[0] + of[1]) * 0.5 if replicas == 2 else of[0]
        optimizer.step()
    close = torch.allclose if "sync" in settings and isinstance(settings["sync"], rp.LocalSteps) else torch.equal
    assert all(close(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))


def test_the_loss_of_several_passes_is_their_sum() -> None:
    losses = []

    def several(micro: rp.Micro, model: nn.Module) -> None:
        first, second, _ = parts(model, micro.batch[0])
        micro.backward(first, more=True)
        micro.backward(second)
        losses.append((first.item(), second.item(), micro.losses.item()))  # type: ignore[union-attr]

    loop(several)
    assert all(both == pytest.approx(first + second) for first, second, both in losses)


def its_own_backward(micro: rp.Micro, model: nn.Module) -> None:
    first, second, _ = parts(model, micro.batch[0])
    first.backward()
    micro.backward(second)


def nothing_after_more(micro: rp.Micro, model: nn.Module) -> None:
    micro.backward(parts(model, micro.batch[0])[0], more=True)


def more_after_the_last(micro: rp.Micro, model: nn.Module) -> None:
    first, second, _ = parts(model, micro.batch[0])
    micro.backward(first)
    micro.backward(second, more=True)


def another_weight(micro: rp.Micro, model: nn.Module) -> None:
    first, second, _ = parts(model, micro.batch[0])
    micro.backward(first, weight=3.0, more=True, retain_graph=True)
    micro.backward(second)


def more_of_what_is_streamed(micro: rp.Micro, model: nn.Module) -> None:
    nothing_after_more(micro, model)


@pytest.mark.parametrize(("body", "settings", "sentence"), [
    (its_own_backward, {}, "the script has called backward.* more=True"),
    (nothing_after_more, {}, "ended without micro.backward.loss.: the last backward pass has no more=True"),
    (more_after_the_last, {}, "came twice"),
    (another_weight, {}, r"its backward passes weigh 3\.0 and 1\.0: pass one to each"),
    (more_of_what_is_streamed, {"memory.parameters": "streamed"}, 'with parameters="streamed" is not supported'),
])  # fmt: skip
def test_passes_that_cannot_work_are_refused_with_a_sentence(
    body: Body, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RallypointError, match=sentence) as raised:
        loop(body, **settings)
    assert isinstance(raised.value, UsageError)


def test_a_hidden_state_of_the_only_replica_may_be_a_buffer() -> None:
    """As docs/loops.md says: a buffer belongs to the version, so whoever computes the next step begins with it."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.cell = nn.GRUCell(3, 5)
            self.register_buffer("state", torch.zeros(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            out = self.cell(x, self.state.clone())
            self.state.copy_(out.detach())
            return out

    model, plain = Recurrent(), Recurrent()
    with EmbeddedJob() as job:
        for micro in job.train(
            model, DATA, batch=4, steps=6, reading=rp.Reading(order="sequential"), optimizer=rp.SGD(lr=0.1),
            decay_1d=True
        ):
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        plain(VALUES[4 * step : 4 * step + 4]).square().mean().backward()
        optimizer.step()
    assert weights_hash(model) == weights_hash(plain)
    assert bool(model.state.any())


def test_torch_autograd_grad_leaves_nothing_behind() -> None:
    """A gradient penalty, and a product with the Hessian: backward passes through backward passes."""

    def twice(micro: rp.Micro, model: nn.Module) -> None:
        batch = micro.batch[0].clone().requires_grad_()
        loss = model(batch).square().mean()
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        own = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        micro.backward(loss + slope.square().sum() + sum((g.square().sum() for g in own), torch.zeros(())))

    found = loop(twice)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    order, optimizer = SampleOrder(seed=0, samples=32, replicas=1, batch=4), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        batch = VALUES[order.samples(step, 0)].clone().requires_grad_()
        loss = model(batch).square().mean()
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        own = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + slope.square().sum() + sum((g.square().sum() for g in own), torch.zeros(()))).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
