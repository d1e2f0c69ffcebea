"""Nothing leaks over a run with kills: every buffer is held by a shard or free, and every credit is given back once."""

from __future__ import annotations

import hashlib
import logging
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.core.cluster.terms import Terms
from rallypoint.net.frames import Header, Kind
from rallypoint.server.intake import Intake
from rallypoint.server.parts import PayloadTickets
from rallypoint.server.shard import OwnedShard
from rallypoint.testing.processes import ProcessCluster, server_main
from support.beside import Beside, until
from support.gathering import Gathering, Once, gathering, reference_hash


class Credits:
    """By connection: payloads that came from workers, and credits that were given back for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: dict[Any, int] = {}
        self.given: dict[Any, int] = {}
        self.channels: dict[Any, set[Any]] = {}
        payload, credit, give_back = Intake._payload, PayloadTickets.credit, Intake._give_back

        def receive(intake: Intake, channel: Any, header: Header) -> Any:
            received = payload(intake, channel, header)
            if header.kind in (Kind.PUSH, Kind.INITIAL):
                self.came[channel] = self.came.get(channel, 0) + 1
                self.channels.setdefault(intake, set()).add(channel)
            return received

        def count(channel: Any) -> None:
            self.given[channel] = self.given.get(channel, 0) + 1
            assert self.given[channel] <= self.came.get(channel, 0) + 1, "more credits than payloads"

        monkeypatch.setattr(Intake, "_payload", receive)
        monkeypatch.setattr(
            PayloadTickets, "credit", lambda tickets, channel: (count(channel), credit(tickets, channel))
        )
        monkeypatch.setattr(Intake, "_give_back", lambda intake, channel: (count(channel), give_back(intake, channel)))


@pytest.mark.some("2")
@pytest.mark.parametrize("replication", [1, 2])
def test_buffers_and_credits_balance_after_a_run_with_kills(
    replication: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")
    credits = Credits(monkeypatch)
    with gathering(3, tmp_path, replication=replication, workers_start=2, workers_max=2) as cluster:
        lose = Once(4, 1, lambda: cluster.servers[2].close())
        for _ in range(2):
            cluster.add_worker(lose)
        assert [worker.result() for worker in cluster.workers] == [reference_hash()] * 2
        assert lose.done
    for server in cluster.servers[:2]:  # with every thread ended
        nothing_is_held(cluster, server)
        channels = credits.channels[server._intake]
        assert len(channels) >= 2, "both workers have pushed to it"
        assert {c: credits.given.get(c, 0) for c in channels} == {c: credits.came[c] for c in channels}


def nothing_is_held(cluster: Gathering, server: Any) -> None:
    """Once its shards let go of theirs, every buffer is free."""
    reducer = server._reducer
    assert reducer._tickets._arrived == {}, "payloads that nobody will use"
    for owned in reducer._owned.values():
        owned.release()
    pool = reducer.job.pool
    until(lambda: len(pool.free) == pool.made, f"{pool.made - len(pool.free)} of {pool.made} buffers were never freed")
    assert len({id(buffer) for buffer in pool.free}) == pool.made, "a buffer is free twice"


# ---- A server with a valid token that acknowledges every update and holds nothing, among real processes ----


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
