"""With a delay a worker computes while its exchange is under way: as far as that goes, and to the same bytes."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from rallypoint.core.cluster.terms import Terms
from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import delay_jobs.py by name

from delay_jobs import reference, train_beside_a_late_worker

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
