"""A key-value store under fire: whatever is killed, each push counts once.

What is pushed does not depend on the values, and every sum of it is exact: the values at the end are right if and only
if each push has counted once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test_survival import Cluster, cluster_of

pytestmark = pytest.mark.programs

STEPS, AT = 12, 5
SCRIPT = f"""
import json, sys, time
from pathlib import Path
import torch, rallypoint as rp
from rallypoint.errors import StoreRolledBack
gate = Path(sys.argv[1])
with rp.join() as job:
    store = job.store({{"w": torch.zeros(70), "b": torch.zeros(3)}}, contributors=4, optimizer=rp.SGD(lr=1.0),
                      network=rp.Network(shard_bytes=128))  # the launcher says sync=
    for step, contributor in store.due("w", {STEPS}):
        while step >= int(gate.read_text()):
            gate.with_name(f"{{job.id}} waits before {{gate.read_text()}}").touch()
            time.sleep(0.005)
        try:
            store.push("w", torch.full((70,), contributor + 1.0), step=step, contributor=contributor)
            if store.step("b", contributor) <= step:  # (a dead worker may have pushed the one and not the other)
                store.push("b", torch.ones(3), contributor=contributor)
        except StoreRolledBack:
            gate.with_name(f"rolled-back-{{job.id}}").touch()  # `due` goes on where the key is
    for step, contributor in store.due("b", {STEPS}):
        store.push("b", torch.ones(3), step=step, contributor=contributor)
    found = [store.pull(key, step=0) for key in ("w", "b")]
    assert all((value == value[0]).all() for value in found)
    gate.with_name(f"found-{{job.id}}").write_text(json.dumps([float(value[0]) for value in found]))
"""
EXPECTED = [-2.5 * STEPS, -1.0 * STEPS]
POLICIES = {
    "sync": (), "async": ("--set", "sync.type=async"),
    "ssp": ("--set", "sync.type=bounded-staleness", "--set", "sync.staleness=2"),
}  # fmt: skip
every = pytest.mark.parametrize("policy", POLICIES)


class StoreCluster(Cluster):
    """Its workers run the script above."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, SCRIPT)

    @property
    def found(self) -> list[list[float]]:
        """The values at the end, as each worker has pulled them."""
        return [json.loads(path.read_text()) for path in sorted(self.home.glob("found-*"))]


cluster = cluster_of(StoreCluster)


@pytest.mark.slow
@every
def test_a_killed_workers_pushes_are_made_by_others_and_count_once(cluster: StoreCluster, policy: str) -> None:
    cluster.run("--workers", "2", "--servers", "2", *POLICIES[policy])
    cluster.until_at(AT)
    cluster.processes()["worker1"].kill()
    cluster.ends()
    assert "worker1 was killed (SIGKILL)" in cluster.output
    assert cluster.found in ([EXPECTED], [EXPECTED] * 2)  # the job may be over before another worker1 has joined


@pytest.mark.some("sync")
@every
def test_a_killed_server_loses_no_push_and_counts_none_twice(cluster: StoreCluster, policy: str) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2", *POLICIES[policy])
    cluster.until_at(AT)
    cluster.until(lambda: cluster.members["exposed"] == 0)  # every shard is on both
    cluster.processes()["server0"].kill()
    cluster.ends()
    assert "server0 was killed (SIGKILL)" in cluster.output
    assert "going back" not in cluster.output
    assert cluster.found == [EXPECTED] * 2


@pytest.mark.slow
def test_values_that_only_a_dead_server_had_go_back_to_a_snapshot_and_each_push_counts_once(
    cluster: StoreCluster,
) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--replication", "1")
    cluster.until_at(AT)
    for server in ("server0", "server1"):
        cluster.processes()[server].kill()
    cluster.until(lambda: "going on from snapshot" in cluster.output)
    cluster.ends()
    assert "Traceback" not in cluster.output
    assert cluster.found == [EXPECTED] * 2


def test_a_killed_coordinator_costs_no_push(cluster: StoreCluster) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_at(AT)
    cluster.processes()["coordinator"].kill()
    cluster.ends()
    assert "going back" not in cluster.output
    assert cluster.found == [EXPECTED] * 2
