"""A delay under local steps: what is kept aside, what an evaluation sees, what a roll-back makes void."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_fragments import holds_version_of

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.core.protocol import Finished
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.tensors import weights_hash
from support.reference_local import train_local_reference
from support.rewinds import Cluster, Once, cluster, loss_of, train
from support.training import finish

__all__ = ["cluster"]  # the fixture
SETTINGS: dict[str, Any] = {
    "replicas": 2, "batch": 8, "steps": 16, "clip": 0.5, "network.shard_bytes": 256, "optimizer": rp.AdamW(lr=1e-2),
    "sync": rp.LocalSteps(steps=6, fragments=3, delay=1),
}  # fmt: skip


def build() -> tuple[torch.nn.Sequential, torch.utils.data.TensorDataset]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.LayerNorm(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)
    )
    return model, torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randn(40, 3))


def undisturbed(**settings: Any) -> str:
    model, data = build()
    train_local_reference(model, data, loss_of, resolve({**SETTINGS, **settings}))
    return weights_hash(model)


@pytest.fixture
def slow_install(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Version 5 is not found to be here before the event is set: replica 0 goes ahead, into step 10."""
    found = threading.Event()
    complete = WorkerMachine.complete

    def late(self: WorkerMachine) -> bool:
        return (self.step != 4 or found.is_set()) and complete.__get__(self)

    monkeypatch.setattr(WorkerMachine, "complete", property(late))
    return found


@pytest.mark.parametrize("replicas", [1, 3])
def test_an_evaluation_sees_the_version_and_changes_nothing(replicas: int, slow_install: threading.Event) -> None:
    """Also in the midst of a round that has been begun before its version was here."""
    model, data = build()
    seen: list[bool] = []
    with EmbeddedJob(servers=2) as job:
        run = job.train(model, data, **{**SETTINGS, "replicas": replicas})

        @run.every(1)
        def evaluate(step: int) -> None:
            seen.append(holds_version_of(job._servers, model))

        def install(micro: rp.Micro) -> None:
            if micro.step == 10:
                assert slow_install.is_set() == (micro.replica != 0)
                slow_install.set()

        finish(run, model, loss_of, inside=install)
    assert seen == [True] * 8
    assert weights_hash(model) == undisturbed(replicas=replicas)


def test_without_the_mixing_or_with_another_share_the_end_is_another_one() -> None:
    hashes = set()
    for delay, mix in ((0, 0.5), (1, 0.5), (1, 1.0)):
        hashes.add(undisturbed(sync=rp.LocalSteps(steps=6, fragments=3, delay=delay, mix=mix)))
    assert len(hashes) == 3


@pytest.mark.parametrize("ahead", [False, True], ids=["in its own round", "ahead of its version"])
def test_after_a_roll_back_every_replica_begins_at_the_version_of_the_snapshot(
    cluster: Cluster, ahead: bool, slow_install: threading.Event
) -> None:
    model, data = build()
    begun: dict[int, bool] = {}

    def lose() -> None:
        cluster.lose_the_server()
        slow_install.set()

    def watch(micro: rp.Micro) -> None:
        if disturb.done and micro.replica not in begun:
            begun[micro.replica] = holds_version_of(cluster.servers[-1:], model)

    disturb = Once((10 if ahead else 9, 0, 0), lose)
    train(cluster.job, model, data, disturb, "before", watch=watch, **SETTINGS)
    assert holds_version_of(cluster.servers[-1:], model)
    assert begun == {0: True, 1: True}


@pytest.mark.parametrize("event", ["a roll-back", "the end"])
def test_steps_ahead_end_when_they_have_become_stale(
    cluster: Cluster, event: str, slow_install: threading.Event
) -> None:
    """Replica 0 goes ahead by two steps, 15 and 16, and nobody needs the second any more."""
    model, data = build()
    settings = {**SETTINGS, "steps": 24, "sync": rp.LocalSteps(steps=9, fragments=3, delay=2)}

    def over() -> None:
        slow_install.set()
        if event == "the end":
            cluster.job._on_message(Finished("another"))
        else:
            cluster.lose_the_server()

    steps = [where for where, _ in train(cluster.job, model, data, Once((15, 0, 0), over), "before", **settings)]
    if event == "the end":
        assert steps[-1] == (15, 0, 0)
    else:
        assert steps[steps.index((15, 0, 0)) + 1][0] < 15
        assert holds_version_of(cluster.servers[-1:], model)
