"""Policies beside plain Sync on real processes: no contribution lost or counted twice, and a model that learns."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rallypoint as rp
from rallypoint.core.cluster.terms import Terms
from rallypoint.store.export import export_snapshot
from rallypoint.testing.processes import ProcessCluster
from rallypoint.worker.tensors import weights_hash

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import the jobs by name

from carry_jobs import Net, plain_hash, train_carrying
from delay_jobs import reference, train_beside_a_late_worker
from mode_jobs import (
    COUNTED_REPLICAS,
    COUNTED_STEPS,
    train_asleep_at_the_end,
    train_beside_a_slow_worker,
    train_counted,
    train_evaluated,
)

LEARNS = 0.7  # of what Sync gains in as many steps: a late gradient of one replica is worth less than R on time


@cache
def _under_sync() -> tuple[str, tuple[str, float, float]]:
    """What the two jobs come to on one worker under Sync."""
    with ProcessCluster(workers=1, servers=1) as cluster:
        (counted,) = cluster.run(train_counted, {})
    with ProcessCluster(workers=1, servers=1) as cluster:
        (evaluated,) = cluster.run(train_evaluated, {})
    return counted, evaluated


@pytest.mark.slow
def test_a_bound_of_no_step_gives_the_bytes_of_sync() -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        outcomes = cluster.run(train_evaluated, {"sync": rp.BoundedStaleness(0)})
    assert outcomes == [_under_sync()[1]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "replication"), [
    (rp.BoundedStaleness(1), 1),
    (rp.BoundedStaleness(3), 2),
    (rp.Async(), 1),
    (rp.Async(), 2),
    (rp.Async(fold=2), 1),
], ids=str)  # fmt: skip
def test_every_contribution_is_applied_once_and_all_workers_end_with_the_same_weights(
    sync: Any, replication: int, tmp_path: Path
) -> None:
    terms = Terms(workers_start=3, workers_max=3, servers=2, replication=replication)
    with ProcessCluster(workers=3, servers=2, terms=terms, folder=str(tmp_path)) as cluster:
        assert cluster.run(train_counted, {"sync": sync}) == [_under_sync()[0]] * 3
    account = _accounts(tmp_path)[-1]
    assert account["applied"] + account["folded"] == COUNTED_STEPS * COUNTED_REPLICAS
    assert account["dropped"] == 0
    assert sum(account["staleness"].values()) == COUNTED_STEPS * COUNTED_REPLICAS


@pytest.mark.slow
@pytest.mark.parametrize("sync", [rp.BoundedStaleness(2), rp.Async()], ids=str)
def test_what_is_applied_on_arrival_learns_nearly_as_well(sync: Any) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        (hash, before, after), (other, _, _) = cluster.run(train_evaluated, {"sync": sync})
    assert hash == other
    _, first, last = _under_sync()[1]
    assert before == first
    assert before - after > LEARNS * (first - last), (before, after, last)


def test_with_a_quorum_nobody_waits_for_a_worker_that_stands_still(tmp_path: Path) -> None:
    """The slow one goes on only once the other is in the last step: were it waited for, the job would hang."""
    terms = Terms(workers_start=2, workers_max=2, servers=1)
    with ProcessCluster(workers=2, servers=1, terms=terms, folder=str(tmp_path)) as cluster:
        (hash, _), (other, computed) = cluster.run(train_beside_a_slow_worker, str(tmp_path / "quick"), 3)
    assert hash == other
    assert computed < 2 * 20  # it went straight on to the newest version
    account = _accounts(tmp_path)[-1]
    assert (account["applied"], account["dropped"]) == (2 * 20, 2 * 20)


def _accounts(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["type"] == "Accounted"]


@pytest.mark.slow
def test_a_worker_given_up_just_before_the_end_still_comes_to_the_last_version() -> None:
    # It is given up 4.5 to 6.8 s after it has fallen asleep, and the end put off for 6 s more: room on both sides.
    terms = Terms(workers_start=2, workers_max=2, servers=1, heartbeat=6.0)
    with ProcessCluster(workers=2, servers=1, terms=terms) as cluster:
        first, second = cluster.run(train_asleep_at_the_end, 7.2)
    assert first == second


# ---- state that replicas carry: the bytes of plain truncated back-propagation through time ----


_plain_hash = cache(plain_hash)


def test_what_is_carried_changes_the_bytes_of_plain_pytorch() -> None:
    """Else the tests below would hold for a job that carries nothing."""
    assert _plain_hash(4) != plain_hash(4, clear=True)


@pytest.mark.some("4-2-2")
@pytest.mark.parametrize(("replicas", "workers", "servers"), [(1, 1, 1), (4, 2, 2), (5, 3, 1), (4, 4, 3)])
def test_truncated_back_propagation_has_the_bytes_of_plain_pytorch(replicas: int, workers: int, servers: int) -> None:
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        assert cluster.run(train_carrying, replicas) == [_plain_hash(replicas)] * workers


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"network.overlap": False}, {"network.presum_bytes": 0}, {"nonfinite": "skip"}, {"network.window": 1},
    {"network.shard_bytes": 64},
    {"sync": {"type": "all-reduce"}}, {"audit.share": 0.5},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_no_setting_of_the_way_changes_a_byte(changes: dict[str, object]) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        assert cluster.run(train_carrying, 4, changes) == [_plain_hash(4)] * 2


def test_an_export_has_the_model_and_not_what_replicas_carry(tmp_path: Path) -> None:
    terms = Terms(workers_start=1, workers_max=1, servers=1, heartbeat=60.0, snapshots=True, snapshot_steps=4)
    with ProcessCluster(workers=1, servers=1, terms=terms, folder=str(tmp_path)) as cluster:
        (found,) = cluster.run(train_carrying, 4)
        cluster.started[0].process.join(60.0)  # the coordinator: the last snapshot is stored
    export_snapshot(str(tmp_path / "snapshots"), tmp_path / "model.safetensors")
    model = Net()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert weights_hash(model) == found == _plain_hash(4)


# ---- with a delay a worker computes while its exchange is under way: as far as that goes ----


_reference = cache(reference)


def _cluster(servers: int) -> ProcessCluster:
    """In which nobody is given up: a replica of the late worker's must not come to the other one."""
    terms = Terms(workers_start=2, workers_max=2, servers=servers, heartbeat=120.0)
    return ProcessCluster(workers=2, servers=servers, terms=terms)


def test_a_worker_goes_on_while_another_is_late_by_as_many_steps_as_the_delay(tmp_path: Path) -> None:
    with _cluster(servers=2) as cluster:
        results = cluster.run(train_beside_a_late_worker, str(tmp_path), False)
    assert [hash for hash, _, _ in results] == [_reference()] * 2
    assert not any(too_far for _, _, too_far in results)
    made = [made for _, made, _ in results]
    assert sorted(made) == [[(replica, step) for step in range(12)] for replica in range(2)], "nothing is made twice"


def test_a_replica_that_has_gone_ahead_contributes_the_same_again_to_the_round_before(tmp_path: Path) -> None:
    with _cluster(servers=1) as cluster:
        results = cluster.run(train_beside_a_late_worker, str(tmp_path), True)
    assert [hash for hash, _, _ in results] == [_reference()] * 2
    made = sorted(made for _, made, _ in results)
    assert made[0] == [(0, step) for step in (*range(10), *range(4, 12))]
    assert made[1] == [(1, step) for step in range(12)]
