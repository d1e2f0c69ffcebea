"""Recomputed activations: fewer bytes kept, the same gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import JobConfig
from rallypoint.errors import ModelError
from rallypoint.worker.module_hooks import Activations, blocks_of
from rallypoint.worker.tensors import weights_hash
from support.training import train


def block(width: int = 8) -> torch.nn.Sequential:
    """A block with dropout: its random numbers must be the same in both passes."""
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Dropout(0.5))


class Net(torch.nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(block() for _ in range(3))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.blocks:
            x = x + part(x)
        return self.head(x)


def gradients(net: torch.nn.Module) -> tuple[list[torch.Tensor], int]:
    """The gradients of one pass, and the bytes that the forward pass has kept."""
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = net(torch.randn(64, 8)).square().mean()
    loss.backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None], sum(kept)


def test_recomputed_blocks_keep_less_and_give_the_same_gradients() -> None:
    plain, kept = gradients(Net())
    net = Net()
    activations = Activations(net, JobConfig(memory=rp.Memory(recompute="blocks")))
    again, less = gradients(net)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert less < kept / 2
    activations.remove()
    net.zero_grad(set_to_none=True)
    assert gradients(net)[1] == kept


def test_a_copy_of_the_model_recomputes_with_its_own_parameters() -> None:
    net = Net()
    Activations(net, JobConfig(memory=rp.Memory(recompute="blocks")))
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other(torch.randn(2, 8)).sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert float(other(torch.randn(2, 8)).detach().abs().sum()) == 0


def test_blocks_inside_of_blocks_are_left_out() -> None:
    outer = torch.nn.ModuleList(torch.nn.Sequential(block(), block()) for _ in range(2))
    assert list(blocks_of(torch.nn.Sequential(outer))) == list(outer)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), "finds no blocks"),
        (torch.nn.ModuleList(torch.nn.Sequential(torch.nn.BatchNorm1d(2)) for _ in range(2)), "would run 0.0 twice"),
    ],
)
def test_a_model_whose_blocks_cannot_run_twice_is_refused(model: torch.nn.Module, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        list(blocks_of(model))


def test_a_job_with_less_memory_ends_with_the_same_bytes() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(2)))

    def trained(**more: Any) -> str:
        net = Net()
        train(net, data, replicas=2, steps=4, optimizer=rp.SGD(lr=0.1), **more)
        assert all("forward" not in vars(module) for module in net.modules())
        return weights_hash(net)

    assert trained(**{"memory.recompute": "blocks"}) == trained()
