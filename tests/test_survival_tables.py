"""Tables under fire: kill anything, and every row of a table ends with the bytes of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from test_survival import AT, STEPS, Cluster, undisturbed_of

pytestmark = pytest.mark.programs

WAIT = "while micro.replica > 0 and micro.step >= int(gate.read_text()): time.sleep(0.005)"
SCRIPT = f"""
import sys, time
from pathlib import Path
import torch, rallypoint as rp
from rallypoint.worker.tensors import weights_hash
gate = Path(sys.argv[1])
torch.manual_seed(0)
top = torch.nn.Sequential(torch.nn.Linear(10, 12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 1))
users = torch.nn.Embedding(300, 5, sparse=True, device="meta")
items = torch.nn.Embedding(40, 5, sparse=True, device="meta")
model = torch.nn.ModuleList([top, users, items])
data = torch.utils.data.TensorDataset(torch.randint(300, (90,)), torch.randint(40, (90,)), torch.randn(90, 1))
with rp.join() as job:
    run = job.train(model, data, replicas=3, batch=4, steps={STEPS}, clip=0.5, network=rp.Network(shard_bytes=256),
                    optimizer=rp.AdamW(lr=1e-2))
    @run.every({STEPS})
    def look(step):
        whole = {{"users": users(torch.arange(300)), "items": items(torch.arange(40))}}
        torch.save(whole, run.folder / "tables.pt")
    for micro in run:
        with micro:
            user, item, label = micro.batch
            # BEFORE
            loss = torch.nn.functional.mse_loss(top(torch.cat([users(user), items(item)], 1)), label)
            # AFTER
            micro.backward(loss)
    if run.lead:
        (run.folder / "hash").write_text(weights_hash(top))
"""


class TableCluster(Cluster):
    """Its workers stop at the gate before they pull the rows of their batch, or once they hold them."""

    def __init__(self, home: Path, where: str = "BEFORE") -> None:
        super().__init__(home, SCRIPT.replace(f"# {where}", WAIT))

    def resume_on(self, *options: str) -> None:
        self.launcher = self._start(self._output, "resume", str(self.folder), *options)

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / "tables.pt", weights_only=True)
        return found

    def ended_as(self, other: TableCluster) -> None:
        """The run ends with the other's bytes."""
        self.open(STEPS)
        assert self.ended() == 0, self.output
        assert "Traceback" not in self.output
        assert self.hash == other.hash
        assert all(torch.equal(self.tables[name], rows) for name, rows in other.tables.items())


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TableCluster]:
    cluster = TableCluster(tmp_path, getattr(request, "param", "BEFORE"))
    yield cluster
    cluster.close()


undisturbed = undisturbed_of(TableCluster)


@pytest.mark.some("AFTER")
@pytest.mark.parametrize("cluster", ["BEFORE", "AFTER"], indirect=True)
def test_a_worker_killed_mid_step_changes_no_row(cluster: TableCluster, undisturbed: TableCluster) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    cluster.until_caught_up(AT)
    cluster.processes()["worker1"].kill()
    cluster.ended_as(undisturbed)
    assert "worker1 was killed (SIGKILL): starting another" in cluster.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server0", "server1"])
@pytest.mark.parametrize("cluster", ["BEFORE", "AFTER"], indirect=True)
def test_a_server_killed_mid_step_changes_no_row_and_nothing_is_rolled_back(
    cluster: TableCluster, undisturbed: TableCluster, victim: str
) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--replication", "2")
    cluster.until_caught_up(AT)
    cluster.until(lambda: cluster.events("Members")[-1]["exposed"] == 0)  # every shard is on both
    cluster.processes()[victim].kill()
    cluster.ended_as(undisturbed)
    assert f"{victim} was killed (SIGKILL): starting another" in cluster.output
    assert "snapshot" not in cluster.output.partition("was killed")[2].partition("step 24/24")[0]


@pytest.mark.slow
def test_a_server_that_alone_held_its_rows_costs_steps_but_no_byte(
    cluster: TableCluster, undisturbed: TableCluster
) -> None:
    cluster.run("--workers", "2", "--servers", "2", "--replication", "1")
    cluster.until_caught_up(AT)
    cluster.processes()["server0"].kill()
    cluster.until(lambda: "going on from snapshot" in cluster.output)
    cluster.ended_as(undisturbed)


@pytest.mark.slow
def test_a_snapshot_goes_on_with_another_number_of_servers(cluster: TableCluster, undisturbed: TableCluster) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    taken = cluster.snapshot_from(AT)
    cluster.kill_everything()
    cluster.resume_on("--workers", "1", "--servers", "3")
    cluster.ended_as(undisturbed)
    assert f": snapshot {taken['snapshot']}" in cluster.output


def test_an_exported_table_is_one_tensor(undisturbed: TableCluster) -> None:
    to = undisturbed.home / "exported.safetensors"
    assert undisturbed.ask("export", str(undisturbed.folder), "--to", str(to)) == 0, undisturbed.answer.read_text()
    exported = safetensors.torch.load_file(to)
    assert torch.equal(exported["1.weight"], undisturbed.tables["users"])
    assert torch.equal(exported["2.weight"], undisturbed.tables["items"])
