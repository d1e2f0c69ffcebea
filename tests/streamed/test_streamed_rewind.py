"""A roll-back while parameters are pulled, forward or backward: it is unwound, and no byte is different."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.errors import NO_SNAPSHOT, JobAborted
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.tensors import weights_hash
from support.rewinds import Cluster, Once, Trap, Where, build, cluster, loss_of
from support.training import finish

__all__ = ["cluster"]  # the fixture

SETTINGS: dict[str, Any] = {
    "replicas": 2, "batch": 8, "steps": 6, "clip": 0.5, "network.shard_bytes": 256, "optimizer": rp.AdamW(lr=1e-2),
    "memory.prefetch_bytes": 100,
}  # fmt: skip
STREAMED: dict[str, Any] = {**SETTINGS, "memory.parameters": "streamed"}
AT = (3, 1, 0)  # step, replica, micro-batch


def train(job: rp.Job, model: torch.nn.Sequential, data: Any, settings: dict[str, Any], at: Once | None = None) -> str:
    """The hash of the last version."""
    hashes: list[str] = []
    with job:
        run = job.train(model, data, **settings)
        run.every(6)(lambda step: hashes.append(weights_hash(model)))
        for micro in run:
            if at is not None:
                at.where = (micro.step, micro.replica, micro.index)
            with micro:
                micro.backward(loss_of(model, micro.batch))
    return hashes[-1]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return train(EmbeddedJob(), *build(), SETTINGS)


@pytest.mark.some("backward-middle")
@pytest.mark.parametrize("at", [(0, 0, 0), AT, (5, 1, 0)], ids=["first", "middle", "last"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_roll_back_in_a_forward_or_a_backward_changes_no_byte(
    cluster: Cluster, undisturbed: str, place: str, at: Where
) -> None:
    model, data = build()
    disturb = Once(at, cluster.lose_the_server)
    assert isinstance(model[2], Trap)
    if place == "forward":
        model[2].in_forward = disturb
    else:
        model[2].in_backward = disturb
    assert train(cluster.job, model, data, STREAMED, disturb) == undisturbed
    assert disturb.done


@pytest.mark.parametrize("reads", ["forward", "weights"])
@pytest.mark.some("forward")
def test_an_evaluation_is_given_up_in_a_roll_back_and_done_again(
    cluster: Cluster, undisturbed: str, reads: str
) -> None:
    model, data = build()
    disturb = Once(AT, cluster.lose_the_server)
    disturb.where = AT
    begun, done = list[int](), list[str]()
    with cluster.job as job:
        run = job.train(model, data, **STREAMED)

        @run.every(3)
        def evaluate(step: int) -> None:
            begun.append(step)
            disturb()
            if reads == "forward":
                loss_of(model, data[:])
            done.append(weights_hash(model))

        finish(run, model, loss_of)
    assert begun == [3, 3, 6], "the first was given up"
    assert len(done) == 2
    assert done[-1] == undisturbed


def test_without_a_snapshot_the_first_values_are_gone() -> None:
    cluster = Cluster(None)
    try:
        model, data = build()
        disturb = Once((0, 0, 0), cluster.lose_the_server)
        assert isinstance(model[2], Trap)
        model[2].in_forward = disturb
        with pytest.raises(JobAborted, match=NO_SNAPSHOT[:20]):
            train(cluster.job, model, data, STREAMED, disturb)
    finally:
        cluster.close()


@pytest.mark.slow
def test_without_a_snapshot_a_model_on_the_meta_device_makes_its_first_values_again() -> None:
    def on_meta() -> tuple[torch.nn.Sequential, Any]:
        _, data = build()
        with torch.device("meta"):
            model, _ = build()
        return model, data

    expected = train(EmbeddedJob(), *on_meta(), STREAMED)
    cluster = Cluster(None)
    try:
        model, data = on_meta()
        disturb = Once((0, 0, 0), cluster.lose_the_server)
        assert isinstance(model[2], Trap)
        model[2].in_forward = disturb
        assert train(cluster.job, model, data, STREAMED, disturb) == expected
        assert disturb.done
    finally:
        cluster.close()
