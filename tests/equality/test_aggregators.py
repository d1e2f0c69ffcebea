"""Aggregators change no byte: the sum is the same tree, whoever adds which of its nodes (I3)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import jobs.py by name

from jobs import reference_hash, train_on_worker, train_with


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
