"""Streamed parameters give the same bytes as those that workers hold, whatever the model does with them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.codec.spec import Bf16
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.worker.slots import Slots
from rallypoint.errors import ConfigError, ModelError, UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.testing.processes import ProcessCluster
from rallypoint.worker.exchange.locked import ShardMemory
from rallypoint.worker.sources.streamed import StreamedParameters, UseOrder

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import streamed_models.py by name

from streamed_models import CASES, COMMON, DATA, Again, build, loss_of, train, train_case

STREAMED: dict[str, Any] = {"memory.parameters": "streamed"}


def alone(name: str, **settings: Any) -> dict[Any, Any]:
    with EmbeddedJob(servers=2) as job:
        return train_case(job, name, settings)


@cache
def held(name: str) -> dict[Any, Any]:
    return alone(name, **{"memory.prefetch_bytes": 1000})


@pytest.mark.some("reads")
@pytest.mark.parametrize("name", CASES)
def test_losses_evaluations_and_weights_are_the_same(name: str) -> None:
    assert alone(name, **STREAMED) == held(name)


def test_a_later_pass_finds_its_parameters_asked_for() -> None:
    model = build(CASES["again"])
    with EmbeddedJob() as job:
        train(job, model, STREAMED)
        streamed = job._run._parts.streamed
    counts, uses = streamed.counts, sum(1 for p in model.parameters())
    assert counts.missed < 5 * uses, "only in the first passes, and what is read outside of any"
    assert counts.ready + counts.late > 5 * counts.missed


def test_a_worker_holds_a_few_parameters_and_gradients_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(20)))
    whole, most = sum(4 * p.numel() for p in model.parameters()), [0, 0]
    ask, words = StreamedParameters._prefetch, ShardMemory.words

    def asked(self: StreamedParameters, used: int = -1) -> None:
        ask(self, used)
        most[0] = max(most[0], sum(4 * pulled.values.numel() for pulled in self._here.values()))

    def claimed(self: ShardMemory, shard: int) -> torch.Tensor:
        found = words(self, shard)
        most[1] = max(most[1], sum(4 * len(held) for held in (*self._held.values(), *self._free)))
        return found

    monkeypatch.setattr(StreamedParameters, "_prefetch", asked)
    monkeypatch.setattr(ShardMemory, "words", claimed)
    data = torch.utils.data.TensorDataset(torch.randn(8, 32))
    with EmbeddedJob() as job:
        run = job.train(
            model, data, steps=3, batch=2, network=rp.Network(shard_bytes=1024), memory=rp.Memory(prefetch_bytes=9000),
            **STREAMED
        )
        for micro in run:
            with micro:
                micro.backward(model(micro.batch[0]).square().mean())
        with torch._C.DisableTorchFunctionSubclass():
            assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters()), "no values are left"
    assert 0 < most[0] < whole / 5
    assert 0 < most[1] < whole / 3


def test_a_gradient_may_begin_while_memory_is_given_back() -> None:
    """A hook takes memory while a link's thread looks for slots that are free: they have no lock in common."""
    layout = build_layout([TensorSpec("w", (64,), "float32", 0)], shard_bytes=64)
    memory = ShardMemory(layout, 1 << 20, pinned=False)

    class Looked(Slots):
        def __getitem__(self, shard: Any) -> Any:
            memory.words(shard + 1)
            return super().__getitem__(shard)

    memory.words(0)
    memory.free(Looked(len(layout.shards)))
    assert sorted(memory._held) == [1]


def test_after_the_run_the_model_has_no_values_and_says_where_they_are() -> None:
    model = build(CASES["again"])
    with EmbeddedJob() as job:
        train(job, model, STREAMED)
        with pytest.raises(UsageError, match="rallypoint export"):
            model.state_dict()
        with pytest.raises(UsageError, match="stay on the servers"):
            model(torch.randn(2, 8))


def test_the_script_may_read_the_model_between_two_micro_batches() -> None:
    model, losses = build(CASES["again"]), list[float]()
    with EmbeddedJob() as job:
        for micro in job.train(model, DATA, **{**COMMON, **STREAMED}):
            with micro:
                micro.backward(loss_of(model, micro.batch))
            if micro.replica < 2:  # (all of the step's contributions are sent after the third)
                losses.append(float(loss_of(model, DATA[:]).detach()))
                assert type(float(model.last.weight.detach().norm())) is float
    assert len(losses) == 12


@pytest.mark.parametrize("where", ["evaluation", "loop"])
def test_the_script_may_compute_gradients_beside_training(where: str) -> None:
    """Autograd keeps some parameters themselves for the backward pass, such as a LayerNorm's weight."""

    def gradient_of(model: torch.nn.Module) -> torch.Tensor:
        with torch.enable_grad():
            x = torch.linspace(-1.0, 1.0, 24).view(3, 8).requires_grad_()
            return torch.autograd.grad(model(x).square().sum(), x)[0]

    def gradients(settings: dict[str, Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.PReLU(8))
        found: list[torch.Tensor] = []
        with EmbeddedJob() as job:
            run = job.train(model, DATA, **{**COMMON, "replicas": 2, **settings})
            if where == "evaluation":
                run.every(2)(lambda step: found.append(gradient_of(model)))
            for micro in run:
                with micro:
                    micro.backward(loss_of(model, micro.batch))
                if where == "loop" and micro.replica == 0:  # (of the second all may be sent, and the version be gone)
                    found.append(gradient_of(model))
        return found

    local, streamed = gradients({}), gradients(STREAMED)
    assert len(local) == (3 if where == "evaluation" else 6)
    assert all(map(torch.equal, local, streamed))


def test_a_graph_that_is_left_after_the_run_says_where_the_values_are() -> None:
    model, left = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)), list[torch.Tensor]()
    with EmbeddedJob() as job:
        for micro in job.train(model, DATA, **{**COMMON, **STREAMED}):
            with micro:
                micro.backward(loss_of(model, micro.batch))
            left.append(model(DATA[:4][0].requires_grad_()).sum())
        with pytest.raises(UsageError, match="stay on the servers"):
            left[0].backward()  # type: ignore[no-untyped-call]


def test_an_evaluation_may_copy_the_model() -> None:
    model, copies = build(CASES["again"]), []
    with EmbeddedJob() as job:
        run = job.train(model, DATA, **{**COMMON, **STREAMED})
        run.every(6)(lambda step: copies.append((copy.deepcopy(model), float(loss_of(model, DATA[:])))))
        for micro in run:
            with micro:
                micro.backward(loss_of(model, micro.batch))
    same, loss = copies[-1]
    assert float(loss_of(same.eval(), DATA[:]).detach()) == loss
    assert all(type(p) is torch.nn.Parameter for p in same.parameters()), "the copy is the script's own"


@pytest.mark.parametrize(("settings", "why"), [
    ({"accumulate": 2}, "use more replicas in place of accumulate"),
    ({"codec": Bf16()}, "use the raw codec"),
    ({"sync": rp.Async()}, "use sync=rp.Sync\\(\\)"),
    ({"precision": "bf16"}, "autocast would keep a bf16 copy"),
])
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], why: str) -> None:
    with EmbeddedJob() as job, pytest.raises(ConfigError, match=why):
        job.train(Again(), DATA, **{**COMMON, **STREAMED, **settings})


def test_models_that_read_parameters_unseen_are_refused() -> None:
    model = Again()
    model.last._compiled_call_impl = model.last.forward  # as `model.last.compile()` leaves it
    with EmbeddedJob() as job, pytest.raises(ModelError, match=r"leave torch\.compile out"):
        job.train(model, DATA, **{**COMMON, **STREAMED})
    with EmbeddedJob() as job, pytest.raises(ModelError, match="0 has max_norm, which writes into its weight"):
        job.train(torch.nn.Sequential(torch.nn.Embedding(9, 3, max_norm=1.0)), DATA, **{**COMMON, **STREAMED})
    with EmbeddedJob() as job, pytest.raises(ConfigError, match="init= is for models on the meta device"):
        job.train(Again(), DATA, init=print, **COMMON)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused() -> None:
    with EmbeddedJob() as job, pytest.raises(ModelError, match="TorchScript"):
        job.train(torch.nn.Sequential(torch.jit.script(torch.nn.Linear(8, 3))), DATA, **{**COMMON, **STREAMED})


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "servers"), [(2, 2), (3, 1)])
def test_any_number_of_workers_and_servers_gives_the_same(workers: int, servers: int) -> None:
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        found = cluster.run(train_case, "several", {**STREAMED, "memory.prefetch_bytes": 1000})
    assert {key: value for one in found for key, value in one.items()} == held("several")


# ---- The order in which passes use parameters, and what is asked for ahead ----


BYTES = [10, 20, 30, 40]


def run(order: UseOrder, uses: Sequence[int]) -> None:
    order.begin()
    for index in uses:
        order.use(index)
    order.end()


def test_nothing_is_known_in_the_first_pass() -> None:
    order = UseOrder(BYTES)
    order.begin()
    order.use(0)
    assert order.ahead(100) == []


def test_the_next_ones_are_asked_for_each_once_up_to_so_many_bytes() -> None:
    order = UseOrder(BYTES)
    run(order, [0, 1, 2, 3, 3, 2, 1, 0])
    order.begin()
    assert order.ahead(60) == [0, 1, 2]
    order.use(0)
    order.use(1)
    assert order.ahead(70) == [2, 3]
    order.use(2)
    assert order.ahead(70) == [3, 2], "the same one, forward and backward, is asked for once"
    assert order.ahead(1) == [3], "the first in any case"


def test_a_pass_in_another_order_finds_its_place_and_is_learnt() -> None:
    order = UseOrder(BYTES)
    run(order, [0, 1, 2, 3])
    order.begin()
    order.use(2)  # 0 and 1 are left out
    assert order.ahead(1000) == [3]
    order.use(0)  # it was used before: the place stays
    assert order.ahead(1000) == [3]
    order.end()
    order.begin()
    assert order.ahead(1000) == [2, 0]


def test_a_pass_that_uses_nothing_changes_nothing() -> None:
    order = UseOrder(BYTES)
    run(order, [1, 2])
    run(order, [])
    order.begin()
    assert order.ahead(1000) == [1, 2]
