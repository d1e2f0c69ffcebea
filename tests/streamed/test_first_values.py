"""First values of models that are built on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.errors import NO_SNAPSHOT, JobAborted, ModelError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.sources.streamed import FirstValues, Init, prepare
from rallypoint.worker.tensors import ModelTensors, weights_hash

CONFIG = resolve({"memory.parameters": "streamed", "network.shard_bytes": 64, "seed": 5})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.ones(4))


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def first(model: nn.Module, init: Init | None = None) -> tuple[ModelTensors, FirstValues]:
    made = prepare(model, CONFIG, init)
    tensors = ModelTensors(model, CONFIG, made)
    return tensors, FirstValues(model, tensors, made, CONFIG.seed, init)


def test_the_values_depend_on_the_seed_and_the_module_only() -> None:
    torch.manual_seed(1)
    tensors, whole = first(on_meta(Net))
    words = whole.words(0, tensors.layout.words)
    torch.manual_seed(2)
    random_before = torch.get_rng_state()
    _, in_parts = first(on_meta(Net))
    shards = [shard for shard in tensors.layout.shards if shard.words]
    parts = {shard.index: in_parts.words(shard.start, shard.stop) for shard in reversed(shards)}
    assert all(torch.equal(words[s.start : s.stop], parts[s.index]) for s in shards), "in any order"
    assert torch.equal(torch.get_rng_state(), random_before)
    by_name = {p.entry.spec.name: p.of(words) for p in tensors.parameters}
    assert not torch.equal(by_name["layers.1.weight"], by_name["layers.2.weight"])
    assert by_name["layers.1.weight"].abs().max() <= 6**-0.5, "torch's own rule"
    assert torch.equal(by_name["norm.weight"], torch.ones(6))
    assert [p.entry.spec.name for p in tensors.parameters if "head" in p.entry.spec.name] == [], "tied: laid out once"


def test_a_model_on_the_meta_device_gets_places_without_memory_and_buffers_with_values() -> None:
    model = on_meta(Net)
    made = prepare(model, CONFIG, None)
    assert made == {name for name, _ in model.named_parameters()}
    assert all(p.device.type == "cpu" and p.untyped_storage().nbytes() == 4 for p in model.parameters())
    assert model.head.weight is model.layers[0].weight
    assert torch.equal(model.norm.running_var, torch.ones(6))
    assert int(model.norm.num_batches_tracked) == 0


def test_a_function_of_a_module_sets_what_torch_does_not() -> None:
    model = on_meta(Scaled)
    _, values = first(model)
    with pytest.raises(ModelError, match=r"gain was built on the meta device.*give job.train init="):
        values.words(0, 30)

    def init(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            nn.init.constant_(module.gain, 3.0)
            nn.init.zeros_(module.bias)

    tensors, values = first(on_meta(Scaled), init)
    by_name = {p.entry.spec.name: p.of(values.words(0, tensors.layout.words)) for p in tensors.parameters}
    assert by_name["gain"].tolist() == [3.0] * 4
    assert by_name["bias"].tolist() == [0.0] * 4
    assert not by_name["weight"].isnan().any()


def test_buffers_and_frozen_parameters_need_values() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mask", torch.ones(2, 2).bool().tril())

    with pytest.raises(ModelError, match=r"buffer .mask was built on the meta device"):
        prepare(on_meta(Masked), CONFIG, None)
    frozen = on_meta(lambda: nn.Linear(2, 2))
    frozen.bias.requires_grad_(False)
    with pytest.raises(ModelError, match="bias is frozen and on the meta device"):
        prepare(frozen, CONFIG, None)


def test_values_of_a_model_that_was_built_are_there_until_a_version_is_installed() -> None:
    torch.manual_seed(3)
    model = Net()
    tensors, values = first(model)
    assert torch.equal(values.words(0, tensors.layout.words), tensors.part(0, tensors.layout.words))
    values.installed()
    with pytest.raises(JobAborted, match=NO_SNAPSHOT):
        values.words(0, 1)
    tensors, values = first(on_meta(Net))
    before = values.words(0, tensors.layout.words)
    values.installed()
    assert torch.equal(values.words(0, tensors.layout.words), before), "made again"


def test_a_model_on_the_meta_device_is_trained() -> None:
    def train() -> list[str]:
        model, seen = on_meta(Net), []
        with EmbeddedJob() as job:
            data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).view(16, 6))
            settings: dict[str, Any] = {"replicas": 2, "batch": 4, "steps": 4, "optimizer": rp.SGD(lr=0.1)}
            run = job.train(model, data, memory=rp.Memory(parameters="streamed"), **settings)
            run.every(2)(lambda step: seen.append(weights_hash(model)))
            for micro in run:
                with micro:
                    micro.backward(model(micro.batch[0]).square().mean())
        return seen

    hashes = train()
    assert len(set(hashes)) == 2
    assert train() == hashes
