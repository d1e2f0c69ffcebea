"""A roll-back in the middle of a micro-batch: ``with micro:`` swallows it, the loop goes on, no byte is different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rallypoint.config import resolve
from rallypoint.core.protocol import Finished
from rallypoint.errors import JobAborted
from rallypoint.testing.reference import train_reference
from rallypoint.worker.tensors import weights_hash
from support.beside import raising
from support.rewinds import AT, SETTINGS, Cluster, Once, Where, build, cluster, loss_of, train

__all__ = ["cluster"]  # the fixture


@pytest.fixture(scope="module")
def undisturbed() -> str:
    model, data = build()
    train_reference(model, data, loss_of, resolve(SETTINGS))
    return weights_hash(model)


@pytest.mark.some("backward-middle", "before-*", "behind-*")
@pytest.mark.parametrize(
    "at", [(0, 0, 0), AT, (3, 1, 1), (5, 1, 1)], ids=["first", "middle", "a replica's last", "last"]
)
@pytest.mark.parametrize("place", ["before", "forward", "backward", "behind"])
def test_a_roll_back_at_any_place_of_the_loop_changes_no_byte(
    cluster: Cluster, undisturbed: str, place: str, at: Where
) -> None:
    """Before a micro-batch: while its data is loaded, say. The loop has it already, and enters it."""
    model, data = build()
    yielded = train(cluster.job, model, data, Once(at, cluster.lose_the_server), place)
    assert weights_hash(model) == undisturbed
    assert all(parameter.grad is None for parameter in model.parameters())
    if place != "behind":
        assert [abandoned for where, abandoned in yielded if where == at][1:] == [False], "it is yielded once more"
    if place in ("before", "forward") or (place == "backward" and at[2] == 0):  # else nothing may be left to give up
        assert [where for where, abandoned in yielded if abandoned] == [at]


def test_one_roll_back_after_the_other_changes_no_byte(cluster: Cluster, undisturbed: str) -> None:
    model, data = build()
    train(cluster.job, model, data, Once((1, 1, 0), cluster.lose_the_server, (2, 0, 0), (4, 0, 0)))
    assert weights_hash(model) == undisturbed


def test_a_fault_of_the_users_in_the_same_place_is_theirs(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        train(cluster.job, *build(), Once(AT, raising(RuntimeError("mine"))))
    assert cluster.coordinator.wait() == "worker0: RuntimeError: mine"


def test_a_job_that_fails_ends_a_forward(cluster: Cluster) -> None:
    with pytest.raises(JobAborted, match="enough"):
        train(cluster.job, *build(), Once(AT, cluster.abort))


def look(
    cluster: Cluster, model: torch.nn.Module, data: Any, disturb: Once, place: str = "before",
    passes: list[Where] | None = None,
) -> None:  # fmt: skip
    """A loop with `passes` of its own before and after each micro-batch, and a disturbance before one of them."""
    made = [] if passes is None else passes

    def own_pass(where: str) -> None:
        if where == place:
            disturb()
        with torch.no_grad():
            model.eval()(data[:][0])
        model.train()
        made.append(disturb.where)

    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            disturb.where = (micro.step, micro.replica, micro.index)
            own_pass("before")
            with micro:
                micro.backward(loss_of(model, micro.batch))
            own_pass("after")
    assert disturb.done


@pytest.mark.some("after-first")
@pytest.mark.parametrize("at", [(0, 0, 0), AT, (5, 1, 1)], ids=["first", "middle", "last"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_roll_back_while_the_script_runs_the_model_outside_of_its_micro_batches_changes_no_byte(
    cluster: Cluster, undisturbed: str, place: str, at: Where
) -> None:
    """A pass of its own, of which it prints something, say: nothing there could swallow what unwinds."""
    model, data = build()
    look(cluster, model, data, Once(at, cluster.lose_the_server), place)
    assert weights_hash(model) == undisturbed


def test_a_pass_outside_of_the_micro_batches_ends_when_the_job_fails(cluster: Cluster) -> None:
    passes: list[Where] = []
    with pytest.raises(JobAborted, match="enough"):
        look(cluster, *build(), Once(AT, cluster.abort), passes=passes)
    assert AT not in passes


@pytest.mark.parametrize("way", [train, look], ids=["in a micro-batch", "outside of them"])
def test_a_job_that_ends_without_this_worker_ends_its_passes_with_a_sentence(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, way: Callable[..., Any]
) -> None:
    """The coordinator waits for no worker that is set apart. Its model is not the job's last version."""
    model, data = build()
    disturb = Once(AT, lambda: cluster.job._on_message(Finished("another")))
    way(cluster.job if way is train else cluster, model, data, disturb)
    assert disturb.where == AT
    assert "the job is over, but this worker's model holds version 3 of 6" in caplog.text
    assert all(parameter.grad is None for parameter in model.parameters())
