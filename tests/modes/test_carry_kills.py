"""Replicas that carry a state, amid kills: the bytes of plain PyTorch, which keeps the states in a list."""

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

from cell_jobs import CellJob, Net, Play, dataset
from test_walk import (
    Walk,
    a_server_with_a_backup_is_killed,
    a_straggler_is_helped_and_killed,
    a_worker_is_killed,
    a_worker_joins_and_another_is_killed,
    a_worker_that_stands_by_takes_over,
    everybody_with_the_state_is_killed,
    the_aggregator_is_killed_mid_step,
    the_whole_job_is_killed_and_resumed,
)

JOB = CellJob(ModeName.SYNC, (Feature.CARRY, Play.RESIZE))  # replicas for more than two workers
HELPED = CellJob(ModeName.SYNC, (Feature.CARRY, Play.RESIZE, Feature.BACKUP_TASKS))
PLAYS = [
    a_worker_is_killed, a_server_with_a_backup_is_killed, everybody_with_the_state_is_killed,
    the_whole_job_is_killed_and_resumed, a_worker_joins_and_another_is_killed, the_aggregator_is_killed_mid_step,
    a_worker_that_stands_by_takes_over, a_straggler_is_helped_and_killed,
]  # fmt: skip


@cache
def plain_hash() -> str:
    """The job in one process: each replica goes on from the hidden state that its step before has left."""
    model, config, data = Net(JOB), JOB.config, dataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order = SampleOrder(seed=config.seed, samples=len(data), replicas=config.replicas, batch=config.batch)
    hidden = [torch.zeros(2, 10) for _ in range(config.replicas)]
    for step in range(config.steps):
        gradients = []
        for replica in range(config.replicas):
            model.zero_grad()
            x, y, index = data[order.samples(step, replica)]
            torch.nn.functional.mse_loss(model(x, index, hidden[replica]), y).backward()
            hidden[replica] = model.hidden.detach()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, of_replicas in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = tree_sum(of_replicas) * (1.0 / config.replicas)
        optimizer.step()
    return weights_hash(model)


@pytest.mark.some("a_worker_is_killed")
@pytest.mark.parametrize("happens", PLAYS, ids=lambda play: play.__name__)
def test_whatever_is_killed_the_bytes_are_those_of_plain_pytorch(
    happens: Callable[[Walk], None], tmp_path: Path
) -> None:
    class Plain(Walk):
        def ends(self, stage, *workers, went_on=True):  # type: ignore[no-untyped-def]
            stage.open()
            assert {stage.result(worker) for worker in workers} == {plain_hash()}

    walk = Plain(tmp_path, HELPED if happens is a_straggler_is_helped_and_killed else JOB)
    try:
        happens(walk)
    finally:
        walk.close()
