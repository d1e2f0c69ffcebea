"""A job that a script's error ends stores the last whole version first, also where a step was on its way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.core.cluster.terms import Terms
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.testing.processes import ClusterFailed, ProcessCluster
from rallypoint.worker.loop.session import Job

PATIENCE_S = 25.0  # less than the 30 s for which a coordinator of this heartbeat waits for a file
LAST = 3  # the step whose contributions are on their way when a script fails


class Fails(torch.autograd.Function):
    """Fails in the backward pass, once version 4 of some shards exists."""

    job: Job | None = None

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Fails.job is not None:
            locked = Fails.job._exchange._locked  # type: ignore[union-attr]
            with locked.changed:
                while LAST + 1 not in locked.machine._versions.newest:  # type: ignore[union-attr]
                    locked.changed.wait(0.01)
            raise ValueError("the script fails in a backward pass")
        return gradient


class OneIsBad(torch.utils.data.Dataset[torch.Tensor]):
    """The first sample of step 4 of replica 0 cannot be read; it is loaded while step 3 is on its way."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 8 * (LAST + 1):
            raise IndexError("the script fails with a sample")
        return torch.full((256,), index / 64)


def train(job: Job, how: str) -> None:
    torch.manual_seed(0)
    first, second, third = (torch.nn.Linear(*size) for size in ((256, 512), (512, 512), (512, 512)))
    model = torch.nn.Sequential(first, second, third)
    data = OneIsBad() if how == "sample" else [torch.full((256,), index / 64) for index in range(64)]
    fails = how != "sample" and job.id == "worker0"
    for micro in job.train(
        model, data, replicas=2, batch=4, steps=8, reading=rp.Reading(order="sequential"), optimizer=rp.AdamW(lr=0.001),
        network=rp.Network(shard_bytes=1 << 16), loader=rp.Loader(retries=0),
    ):  # fmt: skip
        with micro:
            Fails.job = job if fails and how == "backward" and micro.step == LAST else None
            micro.backward(third(Fails.apply(second(first(micro.batch)))).square().mean())
        if fails and how == "loop" and micro.step == LAST and micro.replica == max(replicas_of(job)):
            raise ValueError("the script fails after a step's last backward pass")


def replicas_of(job: Job) -> tuple[int, ...]:
    exchange = job._exchange
    return exchange.view.replicas_of(job.id, LAST)


@pytest.mark.some("sample-1")
@pytest.mark.parametrize(("how", "workers"), [("loop", 1), ("loop", 2), ("sample", 1), ("sample", 2), ("backward", 2)])
def test_an_error_of_a_script_costs_no_step_that_is_on_its_way(tmp_path: Path, how: str, workers: int) -> None:
    terms = Terms(workers_start=workers, workers_max=workers, servers=2, heartbeat=3.0, snapshots=True)
    with ProcessCluster(workers, 2, {"tune": "off"}, terms, str(tmp_path)) as cluster:
        with pytest.raises(ClusterFailed, match="the script fails"):
            cluster.run(train, how)
        coordinator = cluster.started[0].process
        coordinator.join(PATIENCE_S)
        assert coordinator.exitcode == 0, "it waits for what does not come"
    stored = SnapshotStore(str(tmp_path / "snapshots")).latest_usable(print)
    assert stored.version == LAST + 1
