"""Several models in one job, each with its own optimizer: the bytes of a plain PyTorch loop with as many optimizers."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rallypoint.codec.spec import Int8
from rallypoint.core.cluster.terms import Terms
from rallypoint.errors import ConfigError
from rallypoint.store.export import export_snapshot
from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import alternating_jobs.py by name

from alternating_jobs import CASES, bytes_of, dcgan_loop, gan, plain_hash, train_case, train_dcgan

_plain_hash = cache(plain_hash)


def test_the_loop_of_a_dcgan_has_the_bytes_of_pytorch_s_example() -> None:
    """But for the running statistics of the generator, which makes its images once more for its own step."""
    with ProcessCluster(workers=1, servers=1) as cluster:
        (found,) = cluster.run(train_dcgan)
    for name, model in dcgan_loop().items():
        for key, value in model.state_dict().items():
            if name == "discriminator" or ("running" not in key and "batches" not in key):
                assert torch.equal(torch.from_numpy(found[name][key]), value), f"{name}.{key}"


@pytest.mark.some("dcgan-2-2-2")
@pytest.mark.parametrize(
    ("case", "replicas", "workers", "servers"),
    [("dcgan", 1, 1, 1), ("dcgan", 2, 2, 2), *((name, 2, 2, 2) for name in CASES if name != "dcgan")],
)
def test_several_models_have_the_bytes_of_plain_pytorch(
    case: str, replicas: int, workers: int, servers: int
) -> None:
    with ProcessCluster(workers=workers, servers=servers) as cluster:
        assert cluster.run(train_case, case, replicas) == [_plain_hash(case, replicas)] * workers


def test_a_step_moves_the_bytes_of_the_models_that_it_updates_and_no_others() -> None:
    with ProcessCluster(workers=1, servers=1) as cluster:
        (found,) = cluster.run(bytes_of)
    updates = {"discriminator": 8, "generator": 7}  # of 15 steps
    for name, (pushed, got, whole) in found.items():
        assert pushed == updates[name] * whole
        assert got == (updates[name] + 1) * whole, "the first version, and one for each update"


def test_each_model_is_exported_under_its_own_names(tmp_path: Path) -> None:
    terms = Terms(workers_start=1, workers_max=1, servers=1, heartbeat=60.0, snapshots=True, snapshot_steps=4)
    with ProcessCluster(workers=1, servers=1, terms=terms, folder=str(tmp_path)) as cluster:
        (found,) = cluster.run(train_dcgan)
        cluster.started[0].process.join(60.0)  # the coordinator: the last snapshot is stored
    snapshots = str(tmp_path / "snapshots")
    for name, model in gan().items():
        export_snapshot(snapshots, tmp_path / f"{name}.safetensors", only=name)
        export_snapshot(snapshots, tmp_path / f"{name}.pt", only=name)
        model.load_state_dict(load_file(tmp_path / f"{name}.safetensors"))
        assert all(torch.equal(value, torch.from_numpy(found[name][key])) for key, value in model.state_dict().items())
        optimizer = torch.load(tmp_path / f"{name}.pt")["optimizer"]
        assert optimizer.keys() == {key for key, _ in model.named_parameters()}
        assert {state["step"] for state in optimizer.values()} == {7.0}, "Adam has counted the model's own updates"
    with pytest.raises(ConfigError, match="has no model 'critic': there are discriminator, generator"):
        export_snapshot(snapshots, tmp_path / "critic.pt", only="critic")


@pytest.mark.slow
def test_a_codec_with_state_changes_no_byte_with_the_cluster() -> None:
    def hashes(workers: int, servers: int) -> set[str]:
        with ProcessCluster(workers=workers, servers=servers) as cluster:
            return set(cluster.run(train_case, "dcgan", 4, {"codec": Int8()}))

    assert hashes(1, 1) == hashes(2, 2) != {_plain_hash("dcgan", 4)}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"overlap": False}, {"presum_bytes": 0}, {"nonfinite": "skip"}, {"accumulate": 1, "window": 1},
], ids=["no overlap", "each replica by itself", "decided", "one frame in flight"])  # fmt: skip
def test_no_setting_of_the_way_changes_a_byte(changes: dict[str, object]) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        assert cluster.run(train_case, "dcgan", 4, changes) == [_plain_hash("dcgan", 4)] * 2
