"""Models that are updated alternately, amid kills: the bytes of plain PyTorch with an optimizer for each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from rallypoint.core.modes import Feature, ModeName
from rallypoint.core.order import SampleOrder
from rallypoint.testing.reference import tree_sum
from rallypoint.worker.tensors import weights_hash

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import cell_jobs.py by name

from cell_jobs import CellJob, Net, dataset, loss_of
from test_walk import (
    Walk,
    a_server_with_a_backup_is_killed,
    a_worker_joins_and_another_is_killed,
    everybody_with_the_state_is_killed,
    the_aggregator_is_killed_mid_step,
    the_whole_job_is_killed_and_resumed,
)

JOB = CellJob(ModeName.SYNC, (Feature.ALTERNATE, Feature.RESIZE))  # replicas for more than two workers


@cache
def plain_hash() -> str:
    """The job in one process: two torch optimizers, of which each step steps one."""
    model, config = Net(JOB), JOB.config
    parts = {"first": model.first, "last": model.last}
    optimizers = {
        "first": torch.optim.SGD(model.first.parameters(), lr=0.05, momentum=0.5),
        "last": torch.optim.Adam(model.last.parameters(), lr=0.02),
    }
    data = dataset()
    order = SampleOrder(seed=config.seed, samples=len(data), replicas=config.replicas, batch=config.batch)
    for step in range(config.steps):
        name = ("last", "first", "last")[step % 3]
        gradients = []
        for replica in range(config.replicas):
            model.zero_grad()
            loss_of(model, data[order.samples(step // 3, replica)]).backward()
            gradients.append([p.grad.clone() for p in parts[name].parameters() if p.grad is not None])
        for parameter, of_replicas in zip(parts[name].parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = tree_sum(of_replicas) * (1.0 / config.replicas)
        optimizers[name].step()
    return weights_hash(model)


def test_a_worker_that_stands_by_evaluates_each_version_that_is_due(tmp_path: Path) -> None:
    """It pulls a version of the job, which has another number in each model's shards."""
    walk = Walk(tmp_path, CellJob(ModeName.SYNC, (Feature.ALTERNATE, Feature.EVALUATION)))
    try:
        stage = walk.begin(workers=3, at_most=2)
        stage.until(lambda: stage.events("Members") != [], "the job begins")
        computing, standby = stage.events("Members")[-1]["workers"], stage.events("Members")[-1]["standby"]
        assert (len(computing), len(standby)) == (2, 1)
        stage.until_held(*computing)
        walk.ends(stage, *computing, *standby)
        stage.until_over()
        assert [event["step"] for event in stage.events("Metrics")] == [4, 8, 12]
        assert stage.said(f"is evaluated by {standby[0]}")
    finally:
        walk.close()


@pytest.mark.slow
@pytest.mark.parametrize("happens", [
    a_server_with_a_backup_is_killed, everybody_with_the_state_is_killed, the_whole_job_is_killed_and_resumed,
    a_worker_joins_and_another_is_killed, the_aggregator_is_killed_mid_step,
], ids=lambda play: play.__name__)  # fmt: skip
def test_whatever_is_killed_the_bytes_are_those_of_plain_pytorch(
    happens: Callable[[Walk], None], tmp_path: Path
) -> None:
    class Plain(Walk):
        def ends(self, stage, *workers, went_on=True):  # type: ignore[no-untyped-def]
            stage.open()
            assert {stage.result(worker) for worker in workers} == {plain_hash()}

    walk = Plain(tmp_path, JOB)
    try:
        happens(walk)
    finally:
        walk.close()
