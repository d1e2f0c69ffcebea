"""rp.Muon: whole matrices on servers, the bytes of torch's own Muon and AdamW in an ordinary loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import record_of, resolve
from rallypoint.config.changes import changed_record
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.schedule import rate_at
from rallypoint.errors import ConfigError, ModelError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.optim import ShardOptimizer
from rallypoint.worker.tensors import ModelTensors, weights_hash

STEPS = 6
RATE = rp.cosine(0.02, warmup=2)
MUON = rp.Muon(lr=RATE, adamw=("head.*",), adamw_betas=(0.8, 0.9), weight_decay=0.05)


class Net(torch.nn.Module):
    """Matrices, one that AdamW steps, and parameters of one and of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = torch.nn.Conv2d(1, 3, 3)
        self.wide, self.tall = torch.nn.Linear(48, 20), torch.nn.Linear(20, 60)
        self.head = torch.nn.Linear(60, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.view(-1, 1, 6, 6)).flatten(1)
        return self.head(torch.relu(self.tall(torch.relu(self.wide(x)))))


DATA = torch.utils.data.TensorDataset(torch.randn(64, 36, generator=torch.Generator().manual_seed(1)))


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[0][:, :4]).square().mean()


def trained(**settings: Any) -> tuple[Net, list[torch.Tensor]]:
    """The model at the end, and the batches in the order in which replica 0 saw them."""
    model, batches = Net(), list[torch.Tensor]()
    given: dict[str, Any] = {"replicas": 1, "batch": 8, "steps": STEPS, "network.shard_bytes": 256, "optimizer": MUON}
    with EmbeddedJob() as job:
        for micro in job.train(model, DATA, **{**given, **settings}):
            with micro:
                batches.append(micro.batch[0])
                micro.backward(loss_of(model, micro.batch))
    return model, batches


def plain(batches: list[torch.Tensor]) -> Net:
    """The ordinary loop of one process."""
    model = Net()
    matrices = [model.wide.weight, model.tall.weight]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": [p for p in others if p.dim() > 1], "weight_decay": 0.05},
         {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0}], betas=(0.8, 0.9),
    )  # fmt: skip
    for step, batch in enumerate(batches):
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = rate_at(RATE, step, STEPS)
        model.zero_grad()
        loss_of(model, (batch,)).backward()
        muon.step()
        adamw.step()
    return model


def test_a_job_ends_with_the_bytes_of_torch_s_own_muon_and_adamw() -> None:
    model, batches = trained()
    assert len(batches) == STEPS
    assert weights_hash(model) == weights_hash(plain(batches))


def test_each_matrix_is_one_shard_and_the_rest_is_cut_as_ever() -> None:
    config = resolve({"optimizer": MUON, "network.shard_bytes": 256})
    layout = ModelTensors(Net(), config).layout
    whole = {layout.name_at(shard.index, 0): shard.shape for shard in layout.shards if shard.columns}
    assert whole == {"wide.weight": (20, 48), "tall.weight": (60, 20)}
    assert all(shard.nbytes <= 256 for shard in layout.shards if not shard.columns)
    assert sum(shard.words for shard in layout.shards) == sum(p.numel() for p in Net().parameters())


def test_a_matrix_goes_on_elsewhere_with_all_that_its_state_says() -> None:
    config = resolve({"optimizer": MUON, "steps": 8})
    start = torch.linspace(-1, 1, 120)

    def gradient(step: int) -> torch.Tensor:
        return torch.randn(120, generator=torch.Generator().manual_seed(step))

    first, other = ShardOptimizer(config, 0, 120, 10), ShardOptimizer(config, 0, 120, 10)
    first.master.copy_(start)
    for step in range(4):
        first.apply(gradient(step), step)
    arrays, scalars = first.state()
    assert (set(arrays), scalars) == ({"momentum_buffer"}, {})
    assert all(array.shape == (120,) for array in arrays.values())
    other.master.copy_(first.master)
    other.load(arrays, scalars)
    for step in range(4, 8):
        first.apply(gradient(step), step)
        other.apply(gradient(step), step)
    assert torch.equal(first.master, other.master)
    assert not torch.equal(first.master, start)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sync": rp.AllReduce()}, r"own_optimizer=torch\.optim\.Muon"),
        ({"sync": rp.LocalSteps(2)}, "use another optimizer"),
        ({"codec": {"type": "powersgd", "rank": 2}}, "use another codec"),
        ({"optimizer": rp.Muon(ns_steps=100)}, "from 1 to 99"),
    ],
)
def test_what_it_cannot_do_is_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve({"optimizer": MUON, "replicas": 2, **settings})


def test_a_matrix_that_no_frame_carries_is_refused_by_name() -> None:
    side = math.isqrt((1 << 26) // 4) + 1
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(side, side, bias=False))
    config = resolve({"optimizer": rp.Muon(), "memory.parameters": "streamed"})
    with pytest.raises(ModelError, match=r'0\.weight has 64 MiB.*rp\.Muon\(adamw=\("0\.weight",\)\)'):
        ModelTensors(model, config, made={"0.weight"})


def test_a_pattern_that_matches_nothing_is_refused_for_tied_parameters_have_the_first_name() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    with pytest.raises(ModelError, match=r"no trained parameter's name matches 'head\.\*'.*embed\.weight"):
        ModelTensors(Tied(), resolve({"optimizer": MUON}))


def test_which_matrices_are_whole_is_fixed_for_a_run() -> None:
    before = record_of(resolve({"optimizer": MUON}), ModelTensors(Net(), resolve({"optimizer": MUON})).layout)
    with pytest.raises(ConfigError, match="cut by it"):
        changed_record(before, {"optimizer": {"adamw": ["tall.*"]}}, 3)


def test_a_layout_with_matrices_is_another_layout() -> None:
    specs = [TensorSpec("a", (4, 8), "float32", 0), TensorSpec("b", (8,), "float32", 0)]
    assert build_layout(specs, 64).fingerprint != build_layout(specs, 64, matrices={"a"}).fingerprint
