"""The table "what equals what" of docs/architecture.md, in figures: a script of one's own against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rallypoint.config import JobConfig, resolve
from rallypoint.data.loader import MicroBatches
from rallypoint.testing.reference import train_reference

STEPS, FEATURES = 6, 24
NEVER = 1e6  # a norm that no gradient has
Batch = list[torch.Tensor]


def model() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)
    )


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(9)
    return torch.utils.data.TensorDataset(
        torch.randn(64, FEATURES, generator=generator), torch.randn(64, 3, generator=generator)
    )


def loss_of(net: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(net(batch[0]), batch[1])


def config(replicas: int, **more: object) -> JobConfig:
    return resolve({
        "replicas": replicas, "batch": 4, "steps": STEPS, "seed": 3, "network.shard_bytes": 1024,
        "optimizer": {"type": "sgd", "lr": 0.05, "momentum": 0.9}, **more,
    })  # fmt: skip


def reference(job: JobConfig) -> list[torch.Tensor]:
    """The parameters at the end, as a job of these settings has them."""
    net = model()
    train_reference(net, dataset(), loss_of, job)
    return [parameter.detach() for parameter in net.parameters()]


def own_script(
    job: JobConfig, *, clip: float | None = None, micro_batches: Callable[[int], float] = lambda replicas: replicas
) -> list[torch.Tensor]:
    """A loop as one writes it: each loss is divided by R (`micro_batches(R)`), all gradients add up in `.grad`."""
    net, batches = model(), MicroBatches(dataset(), job, torch.device("cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(job.replicas):
            for micro in range(job.accumulate):
                (loss_of(net, batches.load(step, replica, micro)) / micro_batches(job.replicas)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def same_bytes(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(ours, theirs, strict=True)), "another result"
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("replicas", [1, 2])
def test_losses_divided_by_one_or_two_replicas_give_the_same_bytes(replicas: int) -> None:
    assert same_bytes(reference(config(replicas)), own_script(config(replicas)))


@pytest.mark.some("4")
@pytest.mark.parametrize("replicas", [3, 4, 5, 6, 8])
def test_losses_of_more_replicas_are_added_one_after_the_other_there_and_pairwise_here(replicas: int) -> None:
    assert not same_bytes(reference(config(replicas)), own_script(config(replicas)))


@pytest.mark.parametrize("accumulate", [2, 3, 6])
def test_losses_divided_by_the_micro_batches_of_a_replica_give_the_same_bytes(accumulate: int) -> None:
    job = config(1, batch=6, accumulate=accumulate)
    assert same_bytes(reference(job), own_script(job, micro_batches=lambda _: accumulate))


def test_torch_s_own_clipping_gives_the_same_bytes_where_nothing_is_clipped() -> None:
    assert same_bytes(reference(config(2, clip=NEVER)), own_script(config(2), clip=NEVER))


def test_torch_s_own_clipping_has_another_factor_where_something_is_clipped() -> None:
    assert not same_bytes(reference(config(4, clip=0.05)), own_script(config(4), clip=0.05))
