"""A roll-back in the middle of a micro-batch: ``with micro:`` swallows it, the loop goes on, no byte is different.

The only server is lost at a chosen place of the user's loop, and another one comes: the cluster goes back to its last
snapshot while this worker is in the middle of something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Finished
from rallypoint.errors import JobAborted
from rallypoint.net.transport import InprocTransport
from rallypoint.server.service import ServerService
from rallypoint.testing.reference import train_reference
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash
from support.beside import until

PATIENCE_S = 60.0
SETTINGS: dict[str, Any] = {
    "replicas": 2, "batch": 8, "steps": 6, "accumulate": 2, "clip": 0.5, "network.shard_bytes": 256,
    "optimizer": rp.AdamW(lr=1e-2),
}  # fmt: skip
AT = (3, 1, 0)  # step, replica, micro-batch

Where = tuple[int, int, int]


class Cluster:
    """A coordinator with snapshots (None: without), one server at a time, and a worker: in this process."""

    def __init__(self, folder: Path | None, workers: int = 1) -> None:
        self.transport = InprocTransport()
        terms = Terms(
            workers_start=workers, workers_max=workers, servers=1, snapshots=folder is not None, snapshot_steps=1,
            heartbeat=10 * PATIENCE_S,
        )  # fmt: skip
        self.coordinator = CoordinatorService(
            terms=terms, bind="coordinator:0", transport=self.transport,
            join_info=JoinInfo() if folder is None else JoinInfo(snapshots=str(folder)),
        )
        self.coordinator.start()
        self.servers: list[ServerService] = []
        self.add_server()
        self.jobs = [
            Job(id=f"worker{i}", coordinator=self.coordinator.address, transport=self.transport) for i in range(workers)
        ]
        self.job = self.jobs[0]

    def add_server(self) -> None:
        server = ServerService(
            id=f"server{len(self.servers)}", coordinator=self.coordinator.address, bind="server:0",
            transport=self.transport,
        )  # fmt: skip
        server.start()
        self.servers.append(server)

    def lose_the_server(self) -> None:
        """It is gone with all its shards, and another comes: returns once the roll-back has reached the worker."""
        exchange = self.job._exchange
        assert exchange is not None
        before = exchange.view.generation
        self.servers[-1].close()
        self.add_server()
        until(lambda: exchange.view.generation != before, "nothing was rolled back")

    def close(self) -> None:
        for job in self.jobs:
            job.close()
        for server in self.servers:
            server.close()
        self.coordinator.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


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
            x.register_hook(lambda gradient: spring())
        return x


def build() -> tuple[torch.nn.Sequential, torch.utils.data.TensorDataset]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), Trap(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)
    )
    return model, torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randn(40, 3))


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def undisturbed() -> str:
    model, data = build()
    train_reference(model, data, loss_of, resolve(SETTINGS))
    return weights_hash(model)


class Once:
    """Calls it the first time that the loop comes to `at`, and not again."""

    def __init__(self, at: Where, call: Callable[[], None]) -> None:
        self.at, self.call = at, call
        self.where: Where = (-1, -1, -1)
        self.done = False

    def __call__(self) -> None:
        if self.where == self.at and not self.done:
            self.done = True
            self.call()


def train(cluster: Cluster, model: torch.nn.Module, data: Any, trap: Once) -> None:
    """The plainest loop, with a trap in the forward."""
    assert isinstance(model, torch.nn.Sequential)
    assert isinstance(model[2], Trap)
    model[2].in_forward = trap
    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            trap.where = (micro.step, micro.replica, micro.index)
            with micro:
                micro.backward(loss_of(model, micro.batch))


@pytest.mark.some("backward-middle")
@pytest.mark.parametrize("at", [(0, 0, 0), (3, 1, 0), (5, 1, 1)], ids=["first", "middle", "last"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_roll_back_in_a_forward_or_a_backward_changes_no_byte(
    cluster: Cluster, undisturbed: str, place: str, at: Where
) -> None:
    model, data = build()
    disturb = Once(at, cluster.lose_the_server)
    trap = model[2]
    assert isinstance(trap, Trap)
    if place == "forward":
        trap.in_forward = disturb
    else:
        trap.in_backward = disturb
    yielded: list[tuple[Where, bool]] = []
    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            disturb.where = (micro.step, micro.replica, micro.index)
            with micro:
                loss = loss_of(model, micro.batch)
                micro.backward(loss)
            yielded.append((disturb.where, micro.abandoned))
    assert disturb.done
    assert weights_hash(model) == undisturbed
    assert [abandoned for where, abandoned in yielded if where == at][1:] == [False], "it is yielded once more"
    if place == "forward" or at[2] == 0:  # in a replica's last backward nothing may be left that could be given up
        assert [where for where, abandoned in yielded if abandoned] == [at]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("at", [(0, 0, 0), AT, (3, 1, 1)], ids=["first", "a replica's first", "a replica's second"])
def test_a_roll_back_right_before_a_micro_batch_changes_no_byte(cluster: Cluster, undisturbed: str, at: Where) -> None:
    """While its data is loaded, say: the loop has the micro-batch already, and enters it."""
    model, data = build()
    disturb = Once(at, cluster.lose_the_server)
    abandoned = []
    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            disturb.where = (micro.step, micro.replica, micro.index)
            disturb()
            with micro:
                micro.backward(loss_of(model, micro.batch))
            if micro.abandoned:
                abandoned.append(disturb.where)
    assert disturb.done
    assert weights_hash(model) == undisturbed
    assert abandoned == [at]


@pytest.mark.parametrize("at", [AT, (3, 1, 1), (5, 1, 1)], ids=["first", "a replica's last", "the very last"])
def test_a_roll_back_right_after_a_backward_changes_no_byte(cluster: Cluster, undisturbed: str, at: Where) -> None:
    model, data = build()
    disturb = Once(at, cluster.lose_the_server)
    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            disturb.where = (micro.step, micro.replica, micro.index)
            with micro:
                micro.backward(loss_of(model, micro.batch))
                disturb()
    assert disturb.done
    assert weights_hash(model) == undisturbed


def test_one_roll_back_after_the_other_changes_no_byte(cluster: Cluster, undisturbed: str) -> None:
    model, data = build()
    trap = model[2]
    assert isinstance(trap, Trap)
    places = [Once((step, step % 2, 0), cluster.lose_the_server) for step in (1, 2, 4)]
    trap.in_forward = lambda: [place() for place in places] and None  # type: ignore[func-returns-value]
    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            for place in places:
                place.where = (micro.step, micro.replica, micro.index)
            with micro:
                micro.backward(loss_of(model, micro.batch))
    assert all(place.done for place in places)
    assert weights_hash(model) == undisturbed


def test_no_handler_of_the_users_takes_it_for_a_fault(cluster: Cluster, undisturbed: str) -> None:
    model, data = build()
    disturb = Once(AT, cluster.lose_the_server)
    trap = model[2]
    assert isinstance(trap, Trap)
    trap.in_forward = disturb
    caught: list[Exception] = []
    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            disturb.where = (micro.step, micro.replica, micro.index)
            with micro:
                try:
                    loss = loss_of(model, micro.batch)
                except Exception as error:
                    caught.append(error)
                    raise
                micro.backward(loss)
    assert caught == []
    assert weights_hash(model) == undisturbed


def test_a_fault_of_the_users_in_the_same_place_is_theirs(cluster: Cluster) -> None:
    model, data = build()

    def fail() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(cluster, model, data, Once(AT, fail))
    assert cluster.coordinator.wait() == "worker0: RuntimeError: mine"


def test_a_job_that_fails_ends_a_forward(cluster: Cluster) -> None:
    model, data = build()

    def abort() -> None:
        cluster.coordinator.abort("enough")
        until(lambda: cluster.job._failure is not None)

    with pytest.raises(JobAborted, match="enough"):
        train(cluster, model, data, Once(AT, abort))


@pytest.mark.some("after-first")
@pytest.mark.parametrize("at", [(0, 0, 0), AT, (5, 1, 1)], ids=["first", "middle", "last"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_roll_back_while_the_script_runs_the_model_outside_of_its_micro_batches_changes_no_byte(
    cluster: Cluster, undisturbed: str, place: str, at: Where
) -> None:
    """A pass of its own, of which it prints something, say: nothing there could swallow what unwinds."""
    model, data = build()
    disturb = Once(at, cluster.lose_the_server)

    def look(where: str) -> None:
        if where == place:
            disturb()
        with torch.no_grad():
            model.eval()(data[:][0])
        model.train()

    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            disturb.where = (micro.step, micro.replica, micro.index)
            look("before")
            with micro:
                micro.backward(loss_of(model, micro.batch))
            look("after")
    assert disturb.done
    assert weights_hash(model) == undisturbed


def look_before(
    cluster: Cluster, model: torch.nn.Module, data: Any, passes: list[Where], disturb: Callable[[], None]
) -> None:
    """A loop with a pass of its own before each micro-batch, and a disturbance before that at AT."""
    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            if (micro.step, micro.replica, micro.index) == AT:
                disturb()
            with torch.no_grad():
                model.eval()(micro.batch[0])
            passes.append((micro.step, micro.replica, micro.index))
            with micro:
                micro.backward(loss_of(model.train(), micro.batch))


def test_a_pass_outside_of_the_micro_batches_ends_when_the_job_fails(cluster: Cluster) -> None:
    model, data = build()
    passes: list[Where] = []

    def abort() -> None:
        cluster.coordinator.abort("enough")
        until(lambda: cluster.job._failure is not None)

    with pytest.raises(JobAborted, match="enough"):
        look_before(cluster, model, data, passes, abort)
    assert AT not in passes


def test_a_job_that_ends_without_this_worker_lets_a_pass_outside_of_the_micro_batches_end(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = build()
    passes: list[Where] = []
    look_before(cluster, model, data, passes, lambda: cluster.job._on_message(Finished("another")))
    assert passes[-1] == AT
    assert "the job is over, but this worker's model holds version 3 of 6" in caplog.text


def test_a_job_that_ends_without_this_worker_ends_its_forward_with_a_sentence(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator waits for no worker that is set apart. Its model is not the job's last version."""
    model, data = build()
    train(cluster, model, data, Once(AT, lambda: cluster.job._on_message(Finished("another"))))
    assert "the job is over, but this worker's model holds version 3 of 6" in caplog.text
    assert all(parameter.grad is None for parameter in model.parameters())
