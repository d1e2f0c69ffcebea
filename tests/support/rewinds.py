"""The only server is lost at a chosen place of the user's loop, and another one comes.

The cluster goes back to its last snapshot while this worker is in the middle of something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.coordinator.service import JoinInfo
from rallypoint.core.worker.slots import Compute
from rallypoint.worker.loop.session import Job
from support.beside import until
from support.gathering import Roles, loss_of

SETTINGS: dict[str, Any] = {
    "replicas": 2, "batch": 8, "steps": 6, "accumulate": 2, "clip": 0.5, "network.shard_bytes": 256,
    "optimizer": rp.AdamW(lr=1e-2),
}  # fmt: skip
AT = (3, 1, 0)  # step, replica, micro-batch

Where = tuple[int, int, int]


class Cluster(Roles):
    """A coordinator with snapshots (None: without), one server at a time, and a worker: in this process."""

    def __init__(self, folder: Path | None, workers: int = 1) -> None:
        given = {"workers_start": workers, "workers_max": workers, "snapshots": folder is not None}
        info = JoinInfo() if folder is None else JoinInfo(snapshots=str(folder))
        super().__init__(info, servers=1, snapshot_steps=1, **given)
        self.add_servers(1)
        self.jobs = [self.member(f"worker{i}") for i in range(workers)]
        self.job = self.jobs[0]

    def lose_the_server(self) -> None:
        """It is gone with all its shards, and another comes: returns once the roll-back has reached the worker."""
        exchange = self.job._exchange
        assert exchange is not None
        before = exchange.view.generation
        self.servers[-1].close()
        self.add_servers(1)
        until(lambda: exchange.view.generation != before, "nothing was rolled back")

    def abort(self) -> None:
        """End the job; returns once the worker has heard of it."""
        self.coordinator.abort("enough")
        until(lambda: self.job._failure is not None)

    def close(self) -> None:
        for job in self.jobs:
            job.close()
        super().close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def cut_the_link(job: Job, version: int) -> None:
    """What has been sent of this round has to be sent again: returns when that is replica 0's turn."""
    exchange = job._exchange
    assert exchange is not None
    link = exchange._links.get("server0")
    assert link is not None
    assert link._channel is not None
    link._channel.connection.close()
    until(lambda: exchange.next_action() == Compute(version, 0))


class Trap(torch.nn.Module):
    """Does something in the middle of a forward or a backward, when it is armed; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward: Callable[[], None] | None = None
        self.in_backward: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_forward is not None:
            self.in_forward()
        if self.in_backward is not None and x.requires_grad:
            spring = self.in_backward
            x = x.clone()
            x.register_hook(lambda gradient: spring())  # type: ignore[no-untyped-call]
        return x


def build() -> tuple[torch.nn.Sequential, torch.utils.data.TensorDataset]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), Trap(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)
    )
    return model, torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randn(40, 3))


class Once:
    """Calls it the first time that the loop comes to `at`; then the first time that it comes to the next place."""

    def __init__(self, at: Where, call: Callable[[], object], *later: Where) -> None:
        self.left, self.call = [at, *later], call
        self.where: Where = (-1, -1, -1)

    @property
    def done(self) -> bool:
        return not self.left

    def __call__(self) -> None:
        if self.left and self.where == self.left[0]:
            del self.left[0]
            self.call()


def train(
    job: Job, model: Any, data: Any, disturb: Once, place: str = "forward", *,
    watch: Callable[[rp.Micro], object] = lambda micro: None, **settings: Any,
) -> list[tuple[Where, bool]]:  # fmt: skip
    """The plainest loop, in which `disturb` is called at a place of each micro-batch.

    place: "before" it; in its "forward" or "backward" pass (of a model with a `Trap`); or "behind" that, still in it.
    watch: called first with each micro-batch.
    Returns the micro-batches that were yielded, and whether each was abandoned.
    """
    if place in ("forward", "backward"):
        assert isinstance(model[2], Trap)
        setattr(model[2], f"in_{place}", disturb)
    yielded = []
    with job:
        for micro in job.train(model, data, **(settings or SETTINGS)):
            disturb.where = (micro.step, micro.replica, micro.index)
            watch(micro)
            if place == "before":
                disturb()
            with micro:
                micro.backward(loss_of(model, micro.batch))
                if place == "behind":
                    disturb()
            yielded.append((disturb.where, micro.abandoned))
    assert disturb.done
    return yielded
