"""The promise of the raw codec: the same bytes as one process of plain PyTorch, whatever the number of processes.

Of Sync; of AllReduce, whose servers only average while workers step; and of local steps over Sync (DiLoCo).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import rallypoint as rp
from rallypoint.codec.spec import Bf16, Int8
from rallypoint.config import resolve
from rallypoint.testing.processes import ProcessCluster
from rallypoint.testing.reference import train_reference
from rallypoint.worker.tensors import weights_hash

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import jobs.py by name

from jobs import CASES, bytes_pushed, reference_hash, train_on_worker, train_with

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


# ---- replicas cost no bytes: a worker adds up its neighbouring replicas, and pushes once for a block (I3) ----


STEPS = 5  # replicas are not assigned by the workers' speeds before step 6: see `core.placing.assigner`


def _settings(replicas: int, **more: object) -> dict[str, object]:
    return {"replicas": replicas, "batch": 8, "steps": STEPS, "seed": 5, "network.shard_bytes": 16 << 10, **more}


def _reference(settings: dict[str, object]) -> str:
    model, dataset = CASES["gpt"].build()
    train_reference(model, dataset, CASES["gpt"].loss, resolve(settings))
    return weights_hash(model)


@pytest.mark.some("two-runs-of-four-are-two-blocks")
@pytest.mark.parametrize(
    ("replicas", "workers", "more", "vectors"),
    [
        pytest.param(8, 2, {}, 2, id="two-runs-of-four-are-two-blocks"),
        pytest.param(8, 3, {}, 5, id="runs-of-3-3-2-are-five-blocks"),
        pytest.param(8, 1, {}, 1, id="one-worker-pushes-the-root"),
        pytest.param(8, 2, {"network.presum_bytes": 0}, 8, id="without-memory-each-replica-is-pushed"),
        pytest.param(5, 2, {"clip": 0.5}, 3, id="five-replicas-are-0-2-and-2-3-and-3-5"),
    ],
)
def test_so_many_vectors_are_pushed_in_a_step_and_the_bytes_are_those_of_the_reference(
    replicas: int, workers: int, more: dict[str, object], vectors: int
) -> None:
    settings = _settings(replicas, **more)
    with ProcessCluster(workers=workers, servers=2) as cluster:
        results = cluster.run(bytes_pushed, settings)
    assert {result.hash for result in results} == {_reference(settings)}
    whole = results[0].whole * STEPS
    assert sum(result.pushed for result in results) == vectors * whole


# ---- aggregators change no byte: the sum is the same tree, whoever adds which of its nodes (I3) ----


def train_through(
    train: Callable[..., Any], arguments: tuple[Any, ...], *, workers: int, servers: int, aggregators: int
) -> tuple[list[Any], int, int]:
    """What the workers return, and how many contributions the aggregators took and sent."""
    with ProcessCluster(workers=workers, servers=servers, aggregators=aggregators) as cluster:
        results = cluster.run(train, *arguments)
        counts = [cluster.answer(relay) for relay in cluster.relays]
    return results, sum(taken for taken, _ in counts), sum(sent for _, sent in counts)


@pytest.mark.some("weighted-3-1-1")
@pytest.mark.parametrize(
    ("case", "workers", "servers", "aggregators"),
    [
        ("gpt", 2, 2, 1), ("weighted", 3, 1, 1), ("resnet", 4, 2, 2),
        *(pytest.param("gpt", *size, marks=pytest.mark.slow) for size in ((1, 1, 1), (3, 2, 2), (4, 3, 1), (5, 1, 2))),
        pytest.param("resnet accumulated and clipped", 4, 2, 1, marks=pytest.mark.slow),
        pytest.param("gpt weighted and accumulated", 3, 2, 2, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_any_number_of_aggregators_gives_the_bytes_of_plain_pytorch(
    case: str, workers: int, servers: int, aggregators: int
) -> None:
    hashes, taken, sent = train_through(
        train_on_worker, (case,), workers=workers, servers=servers, aggregators=aggregators
    )
    assert set(hashes) == {reference_hash(case)}
    assert taken > 0
    assert sent < taken or workers == 1 or aggregators > 1, "nothing was added up"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["local fresh", "local fragments", "local delay", "all-reduce plain descent"])
def test_other_modes_through_an_aggregator_change_no_byte(case: str) -> None:
    hashes, taken, sent = train_through(train_on_worker, (case,), workers=2, servers=2, aggregators=1)
    assert set(hashes) == {reference_hash(case)}
    assert 0 < sent < taken


@pytest.mark.slow
@pytest.mark.parametrize("codec", [{"type": "bf16"}, {"type": "int8", "error_feedback": False}])
def test_encoded_contributions_and_versions_give_the_same_bytes_as_without_an_aggregator(codec: dict[str, Any]) -> None:
    settings = {
        "replicas": 4, "batch": 4, "steps": 12, "seed": 5, "network.shard_bytes": 4 << 10, "codec": codec,
        "down": {"type": "fp16"},
    }  # fmt: skip
    with ProcessCluster(workers=1, servers=1) as cluster:
        ((alone, _),) = cluster.run(train_with, settings)
    results, taken, sent = train_through(train_with, (settings,), workers=2, servers=2, aggregators=1)
    assert {hash for hash, _ in results} == {alone}
    assert 0 < sent < taken
