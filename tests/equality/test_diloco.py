"""Local steps over Sync: the bytes of plain single-process DiLoCo, whatever the number of processes."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import jobs.py by name

from clusters import on_clusters
from jobs import LOCAL_CASES, local_reference_hash, train_locally_on_worker

_reference_hash = cache(local_reference_hash)
ON_ANY_NUMBER = ("fresh", "kept", "fragments", "periods", "delay")


@pytest.mark.some("kept-2-2")
@on_clusters({case: [(1, 1), (2, 2)] for case in ON_ANY_NUMBER}, workers=[1, 2], servers=[1, 2])
def test_any_number_of_workers_and_servers_gives_the_bytes_of_plain_diloco(
    case: str, workers: int, servers: int
) -> None:
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        assert cluster.run(train_locally_on_worker, case) == [_reference_hash(case)] * workers


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in LOCAL_CASES if name not in ON_ANY_NUMBER])
def test_every_feature_gives_the_bytes_of_plain_diloco(case: str) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        assert cluster.run(train_locally_on_worker, case) == [_reference_hash(case)] * 2


@pytest.mark.slow
def test_what_the_inner_optimizer_keeps_makes_a_difference() -> None:
    assert _reference_hash("kept") != _reference_hash("fresh")
