"""A bit flips in the memory of a server's process, beside real processes: it is given up, and no byte differs."""

from __future__ import annotations

import hashlib
import json
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import rallypoint as rp
from rallypoint.core.cluster.terms import Terms
from rallypoint.server.service import run_servers
from rallypoint.testing.contracts.beside import Beside, until
from rallypoint.testing.flips import Flip, FlippingServer
from rallypoint.testing.processes import ProcessCluster

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import this module by name

STEPS, SHARD = 14, 0
WAITS_AT, MOVED_AT = 4, 8  # a server joins; shards, which move between two steps, have moved to it


def train_audited(job: rp.Job, folder: str) -> str:
    """Train a small model; at two of the steps write the coordinator's address, and wait for a file `go on`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 32)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16))
    for micro in job.train(
        model, data, replicas=2, batch=4, steps=STEPS, shard_bytes=64, optimizer=rp.AdamW(lr=0.01), audit_servers=1
    ):
        with micro:
            if micro.step in (WAITS_AT, MOVED_AT):
                Path(folder, "new").write_text(job._link._places.now()[0])
                Path(folder, "new").rename(Path(folder, f"address {micro.step}"))
                until(Path(folder, f"go on {micro.step}").exists, "the test lets the job go on")
            micro.backward(model(micro.batch[0]).square().mean())
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def flipping_main(pipe: Connection, token: str, id: str, address: str) -> None:
    """A server in whose memory one bit flips, whether it is the shard's primary or its backup."""
    flips = [Flip(SHARD, MOVED_AT + 2, array=2, word=3, bit=20, primary=primary) for primary in (True, False)]
    run_servers([FlippingServer(flips, lambda flip: flips.clear(), id=id, coordinator=address, token=token)])


def _last_members(events: Path) -> dict[str, object]:
    found = [json.loads(line) for line in events.read_text().splitlines()]
    return next((event for event in reversed(found) if event.get("type") == "Members"), {})


@pytest.mark.slow
def test_a_server_whose_memory_flips_a_bit_is_given_up_and_changes_no_byte(tmp_path: Path) -> None:
    plain, flipped = tmp_path / "plain", tmp_path / "flipped"
    for folder in (plain, flipped):
        folder.mkdir()
    for step in (WAITS_AT, MOVED_AT):
        Path(plain, f"go on {step}").touch()
    with ProcessCluster(workers=1, servers=1) as cluster:
        (expected,) = cluster.run(train_audited, str(plain))

    terms = Terms(workers_start=1, workers_max=1, servers=1, replication=2)
    with ProcessCluster(workers=1, servers=1, terms=terms, folder=str(flipped)) as cluster:
        events, results = flipped / "events.jsonl", list[str]()
        with Beside(lambda: results.extend(cluster.run(train_audited, str(flipped)))) as job:
            until((flipped / f"address {WAITS_AT}").exists, "a worker computes")
            cluster.start(flipping_main, "faulty", (flipped / f"address {WAITS_AT}").read_text())
            for step in (WAITS_AT, MOVED_AT):
                until((flipped / f"address {step}").exists, f"a worker computes step {step}")
                until(
                    lambda: "faulty" in str(_last_members(events)) and _last_members(events).get("exposed") == 0,
                    "every shard is on both servers",
                )
                Path(flipped, f"go on {step}").touch()
            job.raise_if_failed()
    said = events.read_text()
    assert "has changed in the memory of faulty on" in said
    assert "ServerMismatch" in said
    assert "going back" not in said
    assert results == [expected]
