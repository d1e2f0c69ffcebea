"""Tables end to end, on real processes: what the servers keep is what plain PyTorch keeps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rallypoint as rp
from rallypoint.errors import UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import table_jobs.py by name

from table_jobs import reference, train

SGD = rp.SGD(lr=rp.cosine(0.3, warmup=3))
ADAGRAD = rp.Adagrad(lr=rp.cosine(0.3, warmup=3), lr_decay=0.01)
LAZY_ADAM = rp.AdamW(lr=rp.cosine(0.02, warmup=3), weight_decay=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD, LAZY_ADAM, ADAGRAD], ids=["sgd", "lazy adam", "adagrad"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 3)])
def test_a_table_on_the_servers_is_trained_as_by_plain_pytorch(optimizer: Any, workers: int, servers: int) -> None:
    settings = {"optimizer": optimizer}
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        results = cluster.run(train, settings)
    _equal(results, reference(settings), exactly=True)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"clip": 0.05}, {"clip": 0.05, "nonfinite": "skip"}], ids=str)
def test_accumulation_and_clipping_count_the_tables_too(settings: dict[str, Any]) -> None:
    settings = {"optimizer": LAZY_ADAM, **settings}
    with ProcessCluster(workers=2, servers=2) as cluster:
        results = cluster.run(train, settings)
    _equal(results, reference(settings), exactly="clip" not in settings)


def _equal(results: list[dict[str, Any]], expected: dict[str, Any], *, exactly: bool) -> None:
    """The lead's state, and the losses that each worker saw, are the reference's."""
    state = next(result["state"] for result in results if result["state"])
    assert state.keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        if exactly:
            assert np.array_equal(state[name], values), name
        else:
            np.testing.assert_allclose(state[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    losses = {place: loss for result in results for place, loss in result["losses"].items()}
    for place, loss in expected["losses"].items():
        assert losses[place] == (loss if exactly else pytest.approx(loss, rel=1e-4)), place


class Half(torch.autograd.Function):
    """Its backward has no gradient for the first input."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradients[0]


def test_rows_to_which_autograd_gives_no_gradient_stay_as_they_are() -> None:
    table = torch.nn.Embedding(30, 4, sparse=True, device="meta")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(1, 4)})
    data = torch.utils.data.TensorDataset(torch.arange(30), torch.rand(30, 1))
    seen: list[torch.Tensor] = []
    with EmbeddedJob() as job:
        run = job.train(model, data, replicas=1, batch=3, steps=3, optimizer=rp.SGD(lr=0.1))
        run.every(1)(lambda step: seen.append(table(torch.arange(30))))
        for micro in run:
            with micro:
                ids, x = micro.batch
                micro.backward(Half.apply(table(ids), model["top"](x)).square().mean())  # type: ignore[no-untyped-call]
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[-1])


def _own_pass(own: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Train, and back-propagate to the table in an `own` pass of the script. Returns its rows and a dense weight."""
    torch.manual_seed(5)
    table = torch.nn.Embedding(30, 4, sparse=True, device="meta")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(4, 1)})
    seen: list[torch.Tensor] = []

    def evaluate(step: int) -> None:
        seen.append(table(torch.arange(30)))
        if own == "evaluation":
            with torch.enable_grad():  # such as the gradient of the loss with respect to the input, or a sharpness
                model["top"](table(torch.arange(30))).square().sum().backward()

    with EmbeddedJob() as job:
        data = torch.utils.data.TensorDataset(torch.arange(30))
        run = job.train(model, data, replicas=2, batch=3, steps=3, optimizer=rp.SGD(lr=0.1))
        run.every(1)(evaluate)
        for micro in run:
            with micro:
                (ids,) = micro.batch
                if own == "micro":
                    table(ids).square().mean().backward()
                micro.backward(model["top"](table(ids)).square().mean())
    return seen[-1], model["top"].weight.detach()


def test_an_evaluation_that_back_propagates_adds_nothing_to_what_rows_are_trained_with() -> None:
    assert all(map(torch.equal, _own_pass("none"), _own_pass("evaluation")))


def test_a_backward_of_the_scripts_own_that_reaches_a_table_is_refused_as_one_that_reaches_a_parameter() -> None:
    with pytest.raises(UsageError, match=r"the script itself calls backward.*rows of table\.weight .* more=True"):
        _own_pass("micro")


@pytest.mark.slow
def test_the_bytes_of_a_step_follow_the_batch_and_not_the_table() -> None:
    settings = {"optimizer": LAZY_ADAM, "network.shard_bytes": 1 << 20, "steps": 8}
    written = []
    for rows in (3_000, 30_000):
        with ProcessCluster(workers=1, servers=2) as cluster:
            (result,) = cluster.run(train, settings, rows, rows)
        written.append(result["bytes"])
    small, large = written
    assert sum(large.values()) < 1.1 * sum(small.values()), (small, large)
    assert sum(large.values()) < 0.1 * (30_000 * 6 * 4) * 7, "or each step would have moved a good part of a table"


@pytest.mark.some("async")
@pytest.mark.parametrize(
    "sync", [rp.BoundedStaleness(staleness=2), rp.Async(scale_by_staleness=True)], ids=["ssp", "async"]
)
def test_one_replica_in_a_streaming_mode_is_trained_as_by_plain_pytorch(sync: Any) -> None:
    settings = {"optimizer": LAZY_ADAM, "replicas": 1}
    with ProcessCluster(workers=1, servers=2) as cluster:
        results = cluster.run(train, {**settings, "sync": sync})
    _equal(results, reference(settings), exactly=True)


@pytest.mark.parametrize(
    "sync", [rp.BoundedStaleness(staleness=2), rp.Async(scale_by_staleness=True)], ids=["ssp", "async"]
)
@pytest.mark.slow
def test_tables_learn_in_the_streaming_modes(sync: Any) -> None:
    settings = {"optimizer": rp.AdamW(lr=0.05, weight_decay=0.0), "sync": sync, "steps": 200}
    with ProcessCluster(workers=2, servers=2) as cluster:
        results = cluster.run(train, settings)
    losses = {place: loss for result in results for place, loss in result["losses"].items()}
    assert losses.keys() == {(step, replica) for step in range(200) for replica in range(3)}
    first, last = (
        np.mean([loss for (step, _), loss in losses.items() if step in steps]) for steps in (range(5), range(190, 200))
    )
    assert last < 0.7 * first
