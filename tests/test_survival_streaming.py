"""Streaming policies under fire: whatever is killed, no contribution of a real run is lost or applied twice.

The gradient does not depend on the weights, and every sum of it is exact: all runs, Sync's included, end with the same
weights if and only if each contribution has been applied once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from test_survival import AT, STEPS, Cluster, cluster_of, undisturbed_run

pytestmark = pytest.mark.programs

SCRIPT = f"""
import sys, time
from pathlib import Path
import torch, rallypoint as rp
from rallypoint.worker.tensors import weights_hash
gate = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(40, 3, bias=False)
torch.nn.init.zeros_(model.weight)
data = torch.utils.data.TensorDataset(torch.randint(-500, 500, (900, 3, 40)).float())
with rp.join() as job:
    run = job.train(
        model, data, replicas=4, batch=2, steps={STEPS}, network=rp.Network(shard_bytes=128), optimizer=rp.SGD(lr=0.5)
    )
    for micro in run:
        with micro:
            while micro.step >= int(gate.read_text()):
                gate.with_name(f"{{job.id}} waits before {{gate.read_text()}}").touch()
                time.sleep(0.005)
            micro.backward((model.weight * micro.batch[0]).sum())
    (run.folder / f"hash-{{job.id}}").write_text(weights_hash(model))
    if run.lead:
        (run.folder / "hash").write_text(weights_hash(model))
"""
POLICIES = {
    "ssp": ("--set", "sync.type=bounded-staleness", "--set", "sync.staleness=2"),
    "async": ("--set", "sync.type=async"),
}
both = pytest.mark.parametrize("policy", POLICIES)


class CountingCluster(Cluster):
    """Its workers run the job above."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, SCRIPT)

    @property
    def hashes(self) -> set[str]:
        """Of all workers' weights at the end."""
        return {path.read_text() for path in self.folder.glob("hash*")}


cluster = cluster_of(CountingCluster)


@pytest.fixture(scope="module")
def under_sync(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The hash at the end of a run under Sync that nothing happened to."""
    with undisturbed_run(CountingCluster(tmp_path_factory.mktemp("sync"))) as cluster:
        yield cluster.hash


@pytest.mark.some("async")
@both
def test_a_worker_killed_mid_run_costs_no_contribution_and_none_is_applied_twice(
    cluster: CountingCluster, under_sync: str, policy: str
) -> None:
    cluster.run("--workers", "2", "--servers", "2", *POLICIES[policy])
    cluster.until_at(AT)
    cluster.processes()["worker1"].kill()
    cluster.ends()
    assert "worker1 was killed (SIGKILL): starting another" in cluster.output
    assert "Traceback" not in cluster.output
    assert cluster.hashes == {under_sync}
    account = cluster.events("Accounted")[-1]
    assert (account["applied"] + account["folded"], account["dropped"]) == (4 * STEPS, 0)


@pytest.mark.slow
@both
def test_a_server_killed_mid_run_costs_no_contribution_and_nothing_is_rolled_back(
    cluster: CountingCluster, under_sync: str, policy: str
) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2", *POLICIES[policy])
    cluster.until_at(AT)
    cluster.until(lambda: cluster.members["exposed"] == 0)  # every shard is on both
    cluster.processes()["server0"].kill()
    cluster.ends()
    assert "server0 was killed (SIGKILL): starting another" in cluster.output
    assert "going back" not in cluster.output
    assert "Traceback" not in cluster.output
    assert cluster.hashes == {under_sync}
