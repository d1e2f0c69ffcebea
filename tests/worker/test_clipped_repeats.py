"""In streaming modes each replica clips its own gradient: by the norm of all of it, whichever shards want it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.core.layout import Layout, Shard
from rallypoint.worker.exchange.locked import WholeVector
from rallypoint.worker.sources.hooks import GradientHooks, Staging
from rallypoint.worker.tensors import ModelTensors, weights_hash
from support.training import train

CLIP = 0.01


class _Replica:
    """What the hooks use of `Exchange.replica`: only the shards of `wanted` take a contribution."""

    def __init__(self, exchange: _Exchange, wanted: Sequence[int]) -> None:
        self._exchange, self._wanted = exchange, wanted
        self.sent: dict[int, torch.Tensor] = {}

    def claim(self, shard: int) -> bool:
        return shard in self._wanted

    def filled(self, shard: int) -> None:
        place = self._exchange.layout.shards[shard]
        self.sent[shard] = self._exchange.buffer[place.start : place.stop].clone()

    def weigh(self, weight: float, *, finite: bool) -> None:
        pass

    def buffers_of(self, replica: int) -> list[Shard]:
        return []

    def computed(self) -> None:
        pass


class _Exchange:
    step = 0

    def __init__(self, layout: Layout, wanted: Sequence[int]) -> None:
        self.layout, self.buffer = layout, torch.full((layout.words,), 7.0)  # of another shard's version, say
        self.memory = WholeVector(layout, self.buffer)
        self.replica = _Replica(self, wanted)

    def check(self, *, stale: bool) -> None:
        pass


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4), torch.nn.Linear(4, 1))


def _contribution(wanted: Sequence[int] | None, accumulate: int) -> dict[int, torch.Tensor]:
    """What the replica's step sends to each shard that wants it (None: all do)."""
    model = _model()
    config = resolve({"replicas": 1, "steps": 1, "network.shard_bytes": 256, "clip": CLIP})
    tensors = ModelTensors(model, config)
    shards = range(len(tensors.layout.shards))
    exchange = _Exchange(tensors.layout, shards if wanted is None else wanted)
    hooks = GradientHooks(tensors, exchange, Staging(), clip=CLIP)  # type: ignore[arg-type]
    torch.manual_seed(5)
    for micro in range(accumulate):
        hooks.begin_backward(1.0, finite=lambda: True, last=micro == accumulate - 1)
        model[:3](torch.randn(6, 8)).square().mean().backward()  # the last layer gets no gradient
    hooks.end_replica(0)
    hooks.remove()
    return exchange.replica.sent


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_contribution_sent_again_to_some_shards_is_the_same(accumulate: int) -> None:
    whole = _contribution(None, accumulate)
    assert len(whole) > 3
    norm = torch.cat(list(whole.values())).norm()
    torch.testing.assert_close(norm, torch.tensor(CLIP), rtol=1e-3, atol=0.0)  # so it was clipped
    for wanted in ([0], [1, 2], [len(whole) - 1]):
        again = _contribution(wanted, accumulate)
        assert sorted(again) == wanted
        for shard, values in again.items():
            assert torch.equal(values, whole[shard]), f"shard {shard} gets another value when only {wanted} are wanted"


@pytest.mark.parametrize("optimizer", [rp.AdamW(lr=1e-3), rp.SGD(lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_a_clipped_job_has_the_same_bytes_with_shards_of_1_2_and_4_mib(optimizer: rp.AdamW | rp.SGD) -> None:
    """The size of shards may follow from the machine: norms are of pieces of 1 MiB whatever it is."""
    found = set()
    for size in (1 << 20, 2 << 20, 4 << 20):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(600, 1100), torch.nn.Tanh(), torch.nn.Linear(1100, 700))
        train(
            model, [torch.linspace(0, n, 600) for n in range(8)], lambda model, batch: model(batch).square().sum(),
            replicas=2, batch=2, clip=0.01, optimizer=optimizer, network=rp.Network(shard_bytes=size),
        )  # fmt: skip
        found.add(weights_hash(model))
    assert len(found) == 1
