"""DDP with the hook, DDP and FSDP2 with the backend: the bytes of plain PyTorch that adds replicas pairwise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the workers' processes import scripts.py by name

from scripts import CASES, backend_script, hook_in_float64, hook_script, plain

QUICK = ["many buckets, built anew after the first step", "unused parameters"]


def _check_hook(world: int, cases: list[str], folder: Path) -> None:
    with ProcessCluster(workers=world, servers=2) as cluster:
        results = cluster.run(hook_script, str(folder), world, cases)
    found = [found for found, _, _ in results]
    assert all(sums > 0 for _, _, sums in results)
    for case in cases:
        assert {of_rank[case][0] for of_rank in found} == {plain(world, case)}, case
        assert len({of_rank[case][1] for of_rank in found}) == 1, case
    if world == 2:  # of two numbers there is one order, and half of a sum is the sum of halves: Gloo's bytes too
        assert found == [beside for _, beside, _ in results]


def test_ddp_with_the_hook_has_the_bytes_of_plain_pytorch_and_of_gloo(tmp_path: Path) -> None:
    _check_hook(2, QUICK, tmp_path)


def test_ddp_with_the_hook_is_right_in_a_script_with_another_default_type(tmp_path: Path) -> None:
    with ProcessCluster(workers=2, servers=1) as cluster:
        for found, beside in cluster.run(hook_in_float64, str(tmp_path), 2, QUICK[:1]):
            assert found == beside


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ddp_with_the_hook_has_the_bytes_of_plain_pytorch_in_every_way_of_using_it(world: int, tmp_path: Path) -> None:
    _check_hook(world, list(CASES), tmp_path)


@pytest.mark.some("2")
@pytest.mark.parametrize("world", [2, 3])
def test_ddp_and_fsdp2_with_the_backend_have_the_bytes_of_plain_pytorch(world: int, tmp_path: Path) -> None:
    with ProcessCluster(workers=world, servers=2) as cluster:
        results: list[dict[str, Any]] = cluster.run(backend_script, str(tmp_path), world)
    right = plain(world, "one bucket")
    for rank, result in enumerate(results):
        assert result["fsdp"] == right
        assert result["ddp"] == plain(world, "one bucket", divides_first=True)
        assert all(sums > 0 for sums in result["sums"]), "servers have made no sums"
        _check_collectives(rank, world, result["collectives"])
        if world == 2:
            assert result["fsdp over gloo"] == right


def _check_collectives(rank: int, world: int, found: dict[str, Any]) -> None:
    ranks = range(1, world + 1)
    total, everybody = float(sum(ranks)), [[float(n), 10.0 * n] for n in ranks]
    flat, summed = [one for pair in everybody for one in pair], [total, 10 * total]
    for name in ("sum", "strided, later", "torch.bfloat16", "torch.float16", "torch.float64", "torch.int64"):
        assert found[name] == summed, name
    assert found["two groups, in another order on each rank"] == [summed, [100 * one for one in summed]]
    assert found["sparse"] == summed
    assert found["mean"] == pytest.approx([one / world for one in summed])
    assert found["max"] == everybody[-1]
    assert found["scattered"] == [summed[rank % 2]]
    assert found["scattered from a list"] == [one + world * rank for one in summed]
    assert found["gathered"] == found["gathered in a list"] == flat
    assert found["broadcast"] == everybody[0]
    assert found["objects"] == [f"rank {n}" for n in range(world)]
    assert found["many times"] == "done"
    assert found["reduced"] == (summed if rank == 0 else None)
    if rank < 2:
        assert found["received"] == (everybody[0] if rank == 1 else [0.0, 0.0])
        assert found["mean of two ranks"] == [1.5, 15.0]
