"""A job whose large payloads go by NIXL ends with the bytes of one over TCP, also when a server is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.net import rdma
from test_survival import AT, SCRIPT, STEPS, Cluster, undisturbed_run

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(not rdma.installed(), reason="NIXL is not installed: pip install 'rallypoint[rdma]'"),
]
# Shards of 64 KiB: shorter payloads go through the stream
LARGE = (
    SCRIPT.replace("Linear(6, 30)", "Linear(6, 12000)").replace("Linear(30, 3)", "Linear(12000, 3)")
    .replace("shard_bytes=256", "shard_bytes=65536")
    .replace("gate = Path", "import logging; logging.basicConfig(level=logging.INFO)\ngate = Path")
)  # fmt: skip


class LargeCluster(Cluster):
    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.script.write_text(LARGE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Over TCP."""
    with undisturbed_run(LargeCluster(tmp_path_factory.mktemp("undisturbed"))) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("ucx", "victim"),
    [
        pytest.param("sm,self,tcp", "server0", marks=pytest.mark.slow),
        pytest.param("tcp", "server0", marks=pytest.mark.slow),
        pytest.param("sm,self,tcp", "worker1", marks=pytest.mark.slow),
        pytest.param("tcp", "", marks=pytest.mark.slow),
    ],
)
def test_a_job_over_nixl_ends_with_the_bytes_of_one_over_tcp(
    tmp_path: Path, undisturbed: Cluster, monkeypatch: pytest.MonkeyPatch, ucx: str, victim: str
) -> None:
    monkeypatch.setenv("UCX_TLS", ucx)
    cluster = LargeCluster(tmp_path)
    try:
        cluster.run("--workers", "2", "--servers", "2", "--replication", "2", "--transport", "nixl")
        cluster.until_caught_up(AT)
        if victim:
            cluster.processes()[victim].kill()
        cluster.open(STEPS)
        assert cluster.ended() == 0, cluster.output
    finally:
        cluster.close()
    assert "go by NIXL" in cluster.output
    assert "Traceback" not in cluster.output
    assert cluster.hash == undisturbed.hash
