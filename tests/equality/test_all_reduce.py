"""Servers only average, workers step: the bytes of plain PyTorch, and of Sync, for any number of processes."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rallypoint as rp
from rallypoint.codec.spec import Bf16, Int8
from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import jobs.py by name

from clusters import on_clusters
from jobs import ALL_REDUCE_CASES, all_reduce_reference_hash, reference_hash, train_stepping_on_worker, train_with

_reference_hash = cache(all_reduce_reference_hash)


@pytest.mark.some("gpt-4-3")
@on_clusters({"gpt": [(1, 1), (4, 3)], "resnet": [(2, 1), (4, 3)]}, workers=[1, 2, 4], servers=[1, 3])
def test_any_number_of_workers_and_servers_gives_the_bytes_of_plain_pytorch(
    case: str, workers: int, servers: int
) -> None:
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        assert cluster.run(train_stepping_on_worker, case) == [_reference_hash(case)] * workers


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in ALL_REDUCE_CASES if name not in ("gpt", "resnet")])
def test_every_feature_gives_the_bytes_of_plain_pytorch(case: str) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        assert cluster.run(train_stepping_on_worker, case) == [_reference_hash(case)] * 2


@pytest.mark.some("gpt")
@pytest.mark.parametrize("case", ["gpt", "resnet"])
def test_that_is_what_sync_comes_to(case: str) -> None:
    assert _reference_hash(case) == reference_hash(case)


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [{"down": Int8()}, {"codec": Int8(), "down": Bf16()}], ids=["down", "both ways"])
def test_codecs_give_the_same_bytes_for_any_number_of_workers(codecs: dict[str, Any]) -> None:
    settings = {"sync": rp.AllReduce(), "steps": 12, **codecs}
    hashes = set()
    for workers in (1, 3):
        with ProcessCluster(workers=workers, servers=2) as cluster:
            hashes |= {hash for hash, _ in cluster.run(train_with, settings)}
    assert len(hashes) == 1


@pytest.mark.slow
def test_workers_beyond_the_replicas_are_given_the_state_at_the_end() -> None:
    with ProcessCluster(workers=5, servers=1) as cluster:
        assert cluster.run(train_stepping_on_worker, "weighted") == [_reference_hash("weighted")] * 5
