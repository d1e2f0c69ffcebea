"""A server with a valid token that acknowledges every update and holds nothing, among real processes."""

from __future__ import annotations

import hashlib
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import rallypoint as rp
from rallypoint.core.cluster.terms import Terms
from rallypoint.server.shard import OwnedShard
from rallypoint.testing.processes import ProcessCluster, server_main
from support.beside import Beside, until

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import this module by name

STEPS, WAITS_AT = 12, 4


def train_slowly(job: rp.Job, folder: str) -> str:
    """Train a small model; at step `WAITS_AT` write the coordinator's address, and wait for a file `go on`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 32)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16))
    for micro in job.train(
        model, data, replicas=2, batch=4, steps=STEPS, network=rp.Network(shard_bytes=64), optimizer=rp.AdamW(lr=0.01)
    ):
        with micro:
            if micro.step == WAITS_AT:
                Path(folder, "new").write_text(job._link._places.now()[0])
                Path(folder, "new").rename(Path(folder, "address"))
                until(Path(folder, "go on").exists, "the test lets the job go on")
            micro.backward(model(micro.batch[0]).square().mean())
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def fake_server_main(pipe: Connection, token: str, id: str, address: str) -> None:
    """A server that computes no digest of what it holds, and says of any version that it has it."""
    OwnedShard.digest = lambda self, before: bytes(16)  # type: ignore[method-assign]
    server_main(pipe, token, id, address)


@pytest.mark.slow
def test_a_backup_that_acknowledges_what_it_does_not_hold_is_given_up_and_changes_no_byte(tmp_path: Path) -> None:
    plain, attacked = tmp_path / "plain", tmp_path / "attacked"
    for folder in (plain, attacked):
        folder.mkdir()
    Path(plain, "go on").touch()
    with ProcessCluster(workers=1, servers=1) as cluster:
        (expected,) = cluster.run(train_slowly, str(plain))

    terms = Terms(workers_start=1, workers_max=1, servers=2, replication=2)
    with ProcessCluster(workers=1, servers=2, terms=terms, folder=str(attacked)) as cluster:
        events, results = attacked / "events.jsonl", list[str]()
        with Beside(lambda: results.extend(cluster.run(train_slowly, str(attacked)))) as job:
            until((attacked / "address").exists, "a worker computes")
            cluster.start(fake_server_main, "fake", (attacked / "address").read_text())
            until(lambda: "fake is gone: it acknowledged version" in events.read_text(), "the fake server is given up")
            Path(attacked, "go on").touch()
            job.raise_if_failed()
    said = events.read_text()
    assert "does not hold what" in said
    assert "going back" not in said
    assert results == [expected]
