"""Replicas cost no bytes: a worker adds up its neighbouring replicas, and pushes once for a block (I3)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rallypoint.config import resolve
from rallypoint.testing.processes import ProcessCluster
from rallypoint.testing.reference import train_reference
from rallypoint.worker.tensors import weights_hash

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import jobs.py by name

from jobs import CASES, bytes_pushed

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
