"""State that replicas carry: the bytes of a plain PyTorch loop with truncated back-propagation through time."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rallypoint.core.cluster.terms import Terms
from rallypoint.store.export import export_snapshot
from rallypoint.testing.processes import ProcessCluster
from rallypoint.worker.tensors import weights_hash

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import carry_jobs.py by name

from carry_jobs import Net, plain_hash, train_carrying

_plain_hash = cache(plain_hash)


def test_what_is_carried_changes_the_bytes_of_plain_pytorch() -> None:
    """Else the tests below would hold for a job that carries nothing."""
    assert _plain_hash(4) != plain_hash(4, clear=True)


@pytest.mark.some("4-2-2")
@pytest.mark.parametrize(("replicas", "workers", "servers"), [(1, 1, 1), (4, 2, 2), (5, 3, 1), (4, 4, 3)])
def test_truncated_back_propagation_has_the_bytes_of_plain_pytorch(replicas: int, workers: int, servers: int) -> None:
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        assert cluster.run(train_carrying, replicas) == [_plain_hash(replicas)] * workers


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"network.overlap": False}, {"network.presum_bytes": 0}, {"nonfinite": "skip"}, {"network.window": 1},
    {"network.shard_bytes": 64},
    {"sync": {"type": "all-reduce"}}, {"audit.share": 0.5},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_no_setting_of_the_way_changes_a_byte(changes: dict[str, object]) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        assert cluster.run(train_carrying, 4, changes) == [_plain_hash(4)] * 2


def test_an_export_has_the_model_and_not_what_replicas_carry(tmp_path: Path) -> None:
    terms = Terms(workers_start=1, workers_max=1, servers=1, heartbeat=60.0, snapshots=True, snapshot_steps=4)
    with ProcessCluster(workers=1, servers=1, terms=terms, folder=str(tmp_path)) as cluster:
        (found,) = cluster.run(train_carrying, 4)
        cluster.started[0].process.join(60.0)  # the coordinator: the last snapshot is stored
    export_snapshot(str(tmp_path / "snapshots"), tmp_path / "model.safetensors")
    model = Net()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert weights_hash(model) == found == _plain_hash(4)
