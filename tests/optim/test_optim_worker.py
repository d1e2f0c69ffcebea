"""Optimizers that workers step (AllReduce): their state goes to another worker in records, and nothing is lost."""

from __future__ import annotations

import pytest
import torch

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.core.optimizer import Optimizer
from rallypoint.errors import ConfigError
from rallypoint.optim import state_names
from rallypoint.store.record import decode_record, encode_record
from rallypoint.worker.loop.own import SpecifiedStepper, WorkerOptimizer
from rallypoint.worker.tensors import ModelTensors

OPTIMIZERS = (
    rp.AdamW(lr=0.1), rp.NAdam(lr=0.1), rp.RAdam(lr=0.1), rp.Adamax(lr=0.1), rp.Adadelta(lr=0.5), rp.ASGD(t0=1),
    rp.RMSprop(lr=0.1, momentum=0.9, centered=True),
)  # fmt: skip


class Net(torch.nn.Module):
    """A parameter of no dimensions beside others: its state has the shape of a number."""

    def __init__(self, rows: int = 12, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 5 * rows, dtype=dtype).view(rows, 5))
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: type(spec).__name__)
def test_a_worker_that_loads_the_state_goes_on_with_the_same_bytes(spec: Optimizer, dtype: torch.dtype) -> None:
    """In bf16 too: the numbers of a state (NAdam's `mu_product`) are fp32 then, and so many weights would show it."""
    config = resolve({"optimizer": spec, "sync": rp.AllReduce(), "steps": 8, "network.shard_bytes": 4096})

    def worker() -> tuple[Net, ModelTensors, WorkerOptimizer]:
        model = Net(1000, dtype)
        tensors = ModelTensors(model, config)
        return model, tensors, WorkerOptimizer(tensors, SpecifiedStepper(tensors, config))

    def gradient(step: int) -> torch.Tensor:
        return torch.randn(tensors.layout.words, generator=torch.Generator().manual_seed(step))

    (model, tensors, first), (other_model, _, other) = worker(), worker()
    for step in range(8):
        if step == 2:
            records = [decode_record(encode_record(first.record(shard), "none")) for shard in tensors.layout.shards]
            assert all((set(r.arrays) - {"master"}, set(r.scalars)) in state_names(spec) for r in records)
            other.install(step, torch.zeros(tensors.layout.words), {r.shard: r for r in records}, skipped=False)
        first.install(step + 1, gradient(step), {}, skipped=False)
        if step >= 2:
            other.install(step + 1, gradient(step), {}, skipped=False)
    assert torch.equal(model.weight, other_model.weight)
    assert torch.equal(model.scale, other_model.scale)


def test_a_group_that_matches_nothing_is_refused_with_the_names_that_there_are() -> None:
    groups = [rp.Group(match=("weight",), lr_scale=0.1), rp.Group(match=("wieght", "w*"), lr_scale=0.5)]
    sentence = r"is in the group match=\['wieght', 'w\*'\]: .* are, weight, scale; the first"
    with pytest.raises(ConfigError, match=sentence):
        ModelTensors(Net(), resolve({"groups": groups}))
    ModelTensors(Net(), resolve({"groups": groups[:1]}))
