"""Several models in one job, each with its own optimizer: the bytes of a plain PyTorch loop with as many optimizers."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import alternating_jobs.py by name

from alternating_jobs import CASES, dcgan_loop, plain_hash, train_case, train_dcgan

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


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"overlap": False}, {"presum_bytes": 0}, {"nonfinite": "skip"}, {"accumulate": 1, "window": 1},
], ids=["no overlap", "each replica by itself", "decided", "one frame in flight"])  # fmt: skip
def test_no_setting_of_the_way_changes_a_byte(changes: dict[str, object]) -> None:
    with ProcessCluster(workers=2, servers=2) as cluster:
        assert cluster.run(train_case, "dcgan", 4, changes) == [_plain_hash("dcgan", 4)] * 2
