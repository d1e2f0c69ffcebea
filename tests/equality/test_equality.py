"""The promise of Sync with the raw codec: the same bytes as plain PyTorch, whatever the number of processes."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import jobs.py by name

from clusters import on_clusters
from jobs import CASES, reference_hash, train_on_worker

_reference_hash = cache(reference_hash)


@pytest.mark.some("resnet-4-2")
@on_clusters(
    {"gpt": [(1, 1), (2, 2), (4, 3)], "resnet": [(1, 3), (2, 1), (4, 2)]}, workers=[1, 2, 4], servers=[1, 2, 3]
)
def test_any_number_of_workers_and_servers_gives_the_bytes_of_plain_pytorch(
    case: str, workers: int, servers: int
) -> None:
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        assert cluster.run(train_on_worker, case) == [_reference_hash(case)] * workers


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if name not in ("gpt", "resnet")])
def test_every_feature_gives_the_bytes_of_plain_pytorch(case: str) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        assert cluster.run(train_on_worker, case) == [_reference_hash(case)] * 2


@pytest.mark.slow
def test_more_workers_than_replicas_changes_no_byte() -> None:
    with ProcessCluster(workers=5, servers=1) as cluster:
        assert cluster.run(train_on_worker, "weighted") == [_reference_hash("weighted")] * 5
