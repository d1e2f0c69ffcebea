"""Fragments that take turns (streaming DiLoCo): what moves at a tick, what stays, what an evaluation sees."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.codec.spec import Bf16
from rallypoint.config import resolve
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.slots import Arriving, Land, Send
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.exchange.pushes import Pushes
from rallypoint.worker.tensors import ModelTensors, weights_hash
from support.reference_local import train_local_reference
from support.rewinds import Cluster, Once, build, cluster, loss_of
from support.rewinds import train as train_disturbed
from support.training import finish, train

__all__ = ["cluster"]  # the fixture
TURNS = rp.LocalSteps(steps=6, fragments=3)
SETTINGS: dict[str, Any] = {
    "replicas": 2, "batch": 8, "steps": 16, "accumulate": 2, "clip": 0.5, "network.shard_bytes": 256,
    "optimizer": rp.AdamW(lr=1e-2), "sync": TURNS,
}  # fmt: skip


def undisturbed(**settings: Any) -> str:
    model, data = build()
    train_local_reference(model, data, loss_of, resolve({**SETTINGS, **settings}))
    return weights_hash(model)


def masters(servers: Any) -> dict[int, torch.Tensor]:
    return {i: shard.master.clone() for s in servers for i, shard in s._reducer._owned.items()}


def in_shards(model: torch.nn.Module) -> list[torch.Tensor]:
    tensors = ModelTensors(model, resolve(SETTINGS))
    return [tensors.part(shard.start, shard.stop) for shard in tensors.layout.shards]


def holds_version_of(servers: Any, model: torch.nn.Module) -> bool:
    """Whether the model has what these servers have."""
    owned = masters(servers)
    return all(torch.equal(shard, owned[index]) for index, shard in enumerate(in_shards(model)))


# ---- what moves ----


def test_a_round_moves_its_fragment_and_the_last_one_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    up: dict[int, int] = defaultdict(int)
    down: dict[int, int] = defaultdict(int)
    rounds = [-1]
    push, handle = Pushes.push, WorkerMachine.handle

    def counted_push(self: Pushes, send: Send) -> None:
        up[rounds[0]] += self.slot(send.shard).nbytes
        push(self, send)

    def counted_handle(self: WorkerMachine, event: Any) -> Any:
        effects = handle(self, event)
        rounds[0] = self.step
        if isinstance(event, Arriving) and effects[0] == Land(event.shard):
            down[self.target] += 256
        return effects

    monkeypatch.setattr(Pushes, "push", counted_push)
    monkeypatch.setattr(WorkerMachine, "handle", counted_handle)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 3))
    data = torch.utils.data.TensorDataset(torch.randn(40, 64), torch.randn(40, 3))
    train(model, data, loss_of, servers=2, **{**SETTINGS, "sync": rp.LocalSteps(steps=8, fragments=4)})
    whole = 4 * sum(p.numel() for p in model.parameters())
    ticks = 16 // 2
    assert up.keys() == set(range(ticks))
    assert up[ticks - 1] == whole, "both replicas in one block, everything"
    for tick in range(ticks - 1):
        assert up[tick] == pytest.approx(whole / 4, rel=0.1)
        assert down[tick + 1] == pytest.approx(whole / 4, rel=0.1)


def test_an_evaluation_sees_the_version_and_changes_nothing() -> None:
    """After the first tick the first fragment is another one, and nothing else is, whatever replicas have moved."""
    model, data = build()
    first = in_shards(model)
    seen: list[list[torch.Tensor]] = []
    served: list[dict[int, torch.Tensor]] = []
    with EmbeddedJob(servers=2) as job:
        run = job.train(model, data, **SETTINGS)

        @run.every(1)
        def evaluate(step: int) -> None:
            seen.append(in_shards(model))
            served.append(masters(job._servers))

        finish(run, model, loss_of)
    for shards, owned in zip(seen, served, strict=True):
        assert all(torch.equal(shard, owned[index]) for index, shard in enumerate(shards))
    cadence = run._exchange._shell.machine.cadence  # type: ignore[union-attr]
    new = [index for index, shard in enumerate(first) if not torch.equal(shard, seen[0][index])]
    assert new == [index for index in range(len(first)) if cadence.due(index, 0)]
    assert 0 < len(new) < len(first)
    assert weights_hash(model) == undisturbed()


def test_parameters_that_are_not_contiguous_are_moved_like_others() -> None:
    hashes = []
    for way in ("engine", "reference"):
        model, data = build()
        for layer in (model[0], model[4]):
            assert isinstance(layer, torch.nn.Linear)
            layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
            assert not layer.weight.is_contiguous()
        if way == "engine":
            train(model, data, loss_of, servers=2, **SETTINGS)
        else:
            train_local_reference(model, data, loss_of, resolve(SETTINGS))
        hashes.append(weights_hash(model))
    assert hashes[0] == hashes[1]


def test_the_last_version_of_every_fragment_comes_as_it_is_on_the_servers() -> None:
    """Encoded versions on the way, the last of each shard raw: by its own number, not by the job's."""
    model, data = build()
    with EmbeddedJob(servers=2) as job:
        finish(job.train(model, data, **SETTINGS, down=Bf16()), model, loss_of)
        assert holds_version_of(job._servers, model)
    assert not all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())


@pytest.mark.parametrize(("replicas", "delay"), [(1, 0), (3, 0), (2, 1)])
def test_the_worker_holds_where_rounds_began_and_for_more_replicas_where_each_is(replicas: int, delay: int) -> None:
    """With a delay, also where the round before this one began."""
    sync = rp.LocalSteps(steps=6, fragments=3, delay=delay)
    model, data = build()
    model[1] = torch.nn.LayerNorm(16) if delay else model[1]  # buffers and a delay do not go together
    source: Any = train(model, data, loss_of, **{**SETTINGS, "replicas": replicas, "sync": sync})._source
    drifts = [inner.drift for inner in source._inner.kept.values()]
    assert len(drifts) == replicas
    for drift in drifts:
        kept = [drift.began, *([drift.earlier] if delay else []), *([drift.left] if replicas > 1 else [])]
        assert all(one.numel() == source._start.numel() for one in kept)
        assert (drift.left is None) == (replicas == 1)


def test_what_is_told_of_a_run_is_a_round_at_a_time_and_each_has_all_replicas(tmp_path: Path) -> None:
    """Another shard stands for each tick in the ledger: one that is due."""
    train(*build(), loss_of, servers=2, folder=tmp_path, **SETTINGS)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    applied = sorted((event["step"], event["replicas"]) for event in events if event["type"] == "Applied")
    assert applied == [(tick, 2) for tick in range(8)]
    done = [event for event in events if event["type"] == "StepDone"]
    assert [event["step"] for event in done] == [*range(1, 16, 2)]
    assert [event["items"] for event in done] == [2 * 8 * 2] * 8


# ---- disturbances ----


@pytest.mark.parametrize("at", [(4, 0, 0), (7, 1, 1), (15, 1, 0)], ids=["a tick's first", "its last", "the last"])
def test_after_a_roll_back_every_replica_begins_at_the_version_of_the_snapshot(
    cluster: Cluster, at: tuple[int, int, int]
) -> None:
    model, data = build()
    disturb, begun = Once(at, cluster.lose_the_server), list[bool]()

    def watch(micro: rp.Micro) -> None:
        if disturb.done and not begun:
            begun.append(holds_version_of(cluster.servers[-1:], model))

    yielded = train_disturbed(cluster.job, model, data, disturb, watch=watch, **SETTINGS)
    assert holds_version_of(cluster.servers[-1:], model)
    assert begun == [True]
    assert [where for where, abandoned in yielded if abandoned] == [at]
    assert {step for (step, _, _), _ in yielded} == set(range(16))
