"""The GPU path: gradients through pinned memory on a side stream, parameters back the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.testing.reference import train_reference
from rallypoint.worker.tensors import weights_hash

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine"),
]

SETTINGS = {
    "replicas": 3, "batch": 8, "steps": 20, "accumulate": 2, "clip": 1.0, "seed": 4, "network.shard_bytes": 4096,
    "optimizer": rp.AdamW(lr=1e-3),
}  # fmt: skip


def build() -> tuple[torch.nn.Module, torch.utils.data.TensorDataset]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 200), torch.nn.BatchNorm1d(200), torch.nn.GELU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(200, 4),
    ).cuda()  # fmt: skip
    return model, torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))


def train(servers: int, **settings: Any) -> torch.nn.Module:
    model, dataset = build()
    with EmbeddedJob(servers=servers) as job:
        for micro in job.train(model, dataset, **SETTINGS, **settings):
            with micro:
                x, y = micro.batch
                assert x.is_cuda
                micro.backward(F.cross_entropy(model(x), y))
    return model


def assert_near_plain(model: torch.nn.Module) -> None:
    expected, dataset = build()
    train_reference(expected, dataset, lambda m, b: F.cross_entropy(m(b[0]), b[1]), resolve(SETTINGS))
    # Not bytes: the reference's optimizer runs on the GPU, a server's on its CPU.
    for (name, got), want in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_a_model_on_a_gpu_trains_as_plain_pytorch_does() -> None:
    assert_near_plain(train(servers=2))


def test_the_number_of_servers_changes_no_byte_on_a_gpu() -> None:
    assert weights_hash(train(servers=1)) == weights_hash(train(servers=3))


def test_an_optimizer_on_the_gpu_trains_as_plain_pytorch_does_for_any_number_of_servers() -> None:
    model = train(servers=2, sync=rp.AllReduce())
    assert weights_hash(model) == weights_hash(train(servers=1, sync=rp.AllReduce()))
    assert_near_plain(model)
