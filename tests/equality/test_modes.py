"""Policies beside plain Sync on real processes: no contribution lost or counted twice, and a model that learns."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rallypoint as rp
from rallypoint.core.cluster.terms import Terms
from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import mode_jobs.py by name

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
