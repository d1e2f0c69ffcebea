"""The promise of the raw codec: the same bytes as one process of plain PyTorch, whatever the number of processes.

Of Sync; of AllReduce, whose servers only average while workers step; and of local steps over Sync (DiLoCo).
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import rallypoint as rp
from rallypoint.codec.spec import Bf16, Int8
from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import jobs.py by name

from jobs import CASES, reference_hash, train_on_worker, train_with

LOCAL = [f"local {name}" for name in ("fresh", "kept", "fragments", "periods", "delay")]
QUICK = {
    "gpt": [(1, 1), (2, 2), (4, 3)], "resnet": [(1, 3), (2, 1), (4, 2)],
    "all-reduce gpt": [(1, 1), (4, 3)], "all-reduce resnet": [(2, 1), (4, 3)],
    **{case: [(1, 1), (2, 2)] for case in LOCAL},
}  # fmt: skip
SIZES = {"gpt": ((1, 2, 4), (1, 2, 3)), "resnet": ((1, 2, 4), (1, 2, 3)), **dict.fromkeys(LOCAL, ((1, 2), (1, 2)))}


@pytest.mark.some("resnet-4-2", "all-reduce gpt-4-3", "local kept-2-2")
@pytest.mark.parametrize(("case", "workers", "servers"), [
    pytest.param(case, *size, marks=() if size in quick else (pytest.mark.slow,))
    for case, quick in QUICK.items() for size in product(*SIZES.get(case, ((1, 2, 4), (1, 3))))
])  # fmt: skip
def test_any_number_of_workers_and_servers_gives_the_bytes_of_plain_pytorch(
    case: str, workers: int, servers: int
) -> None:
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        assert cluster.run(train_on_worker, case) == [reference_hash(case)] * workers


@pytest.mark.slow
@pytest.mark.parametrize(("case", "workers"), [
    *((name, 2) for name in CASES if name not in QUICK), ("weighted", 5), ("all-reduce weighted", 5),
])  # fmt: skip
def test_every_feature_gives_the_bytes_of_plain_pytorch(case: str, workers: int) -> None:
    """Also with more workers than replicas: all have the model at the end."""
    with ProcessCluster(workers=workers, servers=2) as cluster:
        assert cluster.run(train_on_worker, case) == [reference_hash(case)] * workers


@pytest.mark.some("gpt")
@pytest.mark.parametrize("case", ["gpt", "resnet"])
def test_all_reduce_is_what_sync_comes_to(case: str) -> None:
    assert reference_hash(f"all-reduce {case}") == reference_hash(case)


@pytest.mark.slow
def test_what_the_inner_optimizer_keeps_makes_a_difference() -> None:
    assert reference_hash("local kept") != reference_hash("local fresh")


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [{"down": Int8()}, {"codec": Int8(), "down": Bf16()}], ids=["down", "both ways"])
def test_codecs_under_all_reduce_give_the_same_bytes_for_any_number_of_workers(codecs: dict[str, Any]) -> None:
    settings = {"sync": rp.AllReduce(), "steps": 12, **codecs}
    hashes = set()
    for workers in (1, 3):
        with ProcessCluster(workers=workers, servers=2) as cluster:
            hashes |= {hash for hash, _ in cluster.run(train_with, settings)}
    assert len(hashes) == 1
