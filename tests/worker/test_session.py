"""The user's side: what a loop may do, and the sentence it gets when it does something else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import rallypoint as rp
from rallypoint.errors import ConfigError, ModelError, UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.net.transport import InprocConnection
from support import training
from support.beside import raising
from support.training import DATA, Loss, finish, square


def train(model: torch.nn.Module, loss: Loss = square, **settings: Any) -> rp.Run:
    return training.train(model, DATA, loss, servers=2, **{"replicas": 2, **settings})


def test_a_gradient_leaves_nothing_behind_in_the_model() -> None:
    model = torch.nn.Linear(3, 2)
    train(model, accumulate=2)
    assert model.weight.grad is None
    square(model, DATA[:2]).backward()  # no hook of ours is left on it
    assert model.weight.grad is not None


def test_the_job_s_record_has_every_name_of_a_tied_tensor() -> None:
    """Snapshots keep the record, and `export` writes a tied tensor under each of its names."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    model = Tied()
    with EmbeddedJob() as job:
        finish(job.train(model, DATA, batch=4, steps=1), model)
        record = job._coordinator._shell.machine.record
    assert record.tied == {"second.weight": "first.weight"}


def test_a_failed_run_gives_the_model_back() -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="mine"):
        train(model, raising(RuntimeError("mine")))
    square(model, DATA[:2]).backward()
    assert model.weight.grad is not None
    train(model)


def test_half_precision_parameters_are_trained_from_fp32_masters() -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    before = square(model, [DATA[:][0].bfloat16()]).item()
    train(model, lambda m, b: square(m, [b[0].bfloat16()]), steps=40, optimizer=rp.AdamW(lr=1e-3))
    assert model.weight.dtype is torch.bfloat16
    # Updates of 1e-3 are below half a bf16 step of weights near 0.5: only an fp32 master adds them up.
    assert square(model, [DATA[:][0].bfloat16()]).item() < before


def test_every_replica_starts_from_the_versions_buffers_and_replica_0s_are_kept() -> None:
    model = torch.nn.BatchNorm1d(3)
    counts: list[int] = []

    def loss(m: torch.nn.Module, batch: Any) -> torch.Tensor:
        counts.append(int(m.num_batches_tracked))
        return square(m, batch)

    train(model, loss, replicas=3, steps=2)
    assert counts == [0, 0, 0, 1, 1, 1]
    assert int(model.num_batches_tracked) == 2


class Twice(torch.nn.Module):
    """A reentrant checkpoint around a shared layer: autograd accumulates its gradient twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize(
    ("model", "loss", "sentence"),
    [
        (torch.nn.EmbeddingBag(9, 2, sparse=True), lambda m, b: m(b[0].abs().long()).mean(), "sparse gradient"),
        (Twice(), square, "got a gradient twice"),
    ],
    ids=["sparse", "twice"],
)
def test_a_gradient_that_cannot_be_carried_is_refused_by_name(
    model: torch.nn.Module, loss: Loss, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        train(model, loss)


def test_one_job_has_one_run_which_is_iterated_once() -> None:
    model = torch.nn.Linear(3, 2)
    with EmbeddedJob() as job:
        run = job.train(model, DATA, batch=4, steps=1)
        finish(run, model)
        with pytest.raises(UsageError, match="once"):
            next(iter(run))
        with pytest.raises(UsageError, match=r"one job\.train"):
            job.train(model, DATA)


def loop(body: Callable[[rp.Micro, torch.nn.Module], None], *, enter: bool) -> None:
    model = torch.nn.Linear(3, 2)
    with EmbeddedJob() as job:
        for micro in job.train(model, DATA, replicas=1, batch=4, steps=2, accumulate=2):
            with micro if enter else nullcontext():
                body(micro, model)


def backward_twice(micro: rp.Micro, model: torch.nn.Module) -> None:
    micro.backward(square(model, micro.batch))
    micro.backward(square(model, micro.batch))


def backward_of_a_vector(micro: rp.Micro, model: torch.nn.Module) -> None:
    micro.backward(model(micro.batch[0]).sum(1))


def backward_with_a_weight_of_zero(micro: rp.Micro, model: torch.nn.Module) -> None:
    micro.backward(square(model, micro.batch), weight=0.0)


def backward_with_two_weights(micro: rp.Micro, model: torch.nn.Module) -> None:
    micro.backward(square(model, micro.batch), weight=1.0 + micro.index)


def no_backward(micro: rp.Micro, model: torch.nn.Module) -> None:
    square(model, micro.batch)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (backward_twice, "add the losses"),
        (backward_of_a_vector, "scalar loss"),
        (backward_with_a_weight_of_zero, "weights are positive"),
        (backward_with_two_weights, "pass one"),
        (no_backward, r"without micro\.backward"),
        (None, r"without micro\.backward"),
    ],
)
def test_a_loop_that_cannot_work_is_told_so(
    body: Callable[[rp.Micro, torch.nn.Module], None] | None, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        loop(body or no_backward, enter=body is not None)


def test_a_loop_may_be_left_early() -> None:
    with EmbeddedJob() as job:
        for _ in job.train(torch.nn.Linear(3, 2), DATA, batch=4, steps=10):
            break


@pytest.mark.parametrize(("limit", "setting", "value", "shares"), [
    ("limit_in_flight", "in_flight_bytes", 128 << 10, {64 << 10, 128 << 10}),
    ("pace", "pace_mbit", 80.0, {5_000_000, 10_000_000}),
])  # fmt: skip
def test_links_share_what_is_set_for_one_machine(
    monkeypatch: pytest.MonkeyPatch, limit: str, setting: str, value: float, shares: set[int]
) -> None:
    """The worker has two links, each server one."""
    seen: list[int] = []
    monkeypatch.setattr(InprocConnection, limit, lambda self, share: seen.append(share))
    train(torch.nn.Linear(3, 2))
    assert seen == []
    train(torch.nn.Linear(3, 2), **{f"network.{setting}": value})
    assert set(seen) == shares


def test_links_share_a_measured_port_where_there_are_as_many_servers_as_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[float] = []
    monkeypatch.setattr(InprocConnection, "share_port", lambda self, part: parts.append(part))
    model = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Linear(64, 2))  # 16 shards of 64 bytes, and more
    for off in ({"network.pacing": "off"}, {"network.pace_mbit": 80.0}):
        train(model, **{"network.shard_bytes": 64}, **off)
    train(torch.nn.Linear(3, 2))  # two shards
    assert parts == []
    train(model, **{"network.shard_bytes": 64})
    assert parts
    assert all(0.5 <= part < 1.0 for part in parts)  # one worker, two servers


def test_what_may_be_in_flight_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="in_flight_bytes is -1: it must be a whole number of at least 0"):
        train(torch.nn.Linear(3, 2), **{"network.in_flight_bytes": -1})
