"""Bits that flip in a server's memory: found before anything is computed from them, and the bytes stay the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gathering import Gathering, Once, reference_hash

from rallypoint.net.auditing.messages import ServerMismatch
from rallypoint.testing.contracts.beside import until
from rallypoint.testing.flips import Flip, FlippingServer

SHARD, STEP = 1, 4
NAMES = ["exp_avg", "exp_avg_sq", "master"]  # of what AdamW keeps


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="rallypoint")


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return reference_hash()


@contextmanager
def two_servers(folder: Path | None = None, **terms: Any) -> Iterator[Gathering]:
    cluster = Gathering(folder, servers=2, **terms)
    try:
        yield cluster
    finally:
        cluster.close()


class Faulty:
    """A cluster with two servers whose bits flip when a worker comes to step `STEP`."""

    def __init__(self, cluster: Gathering) -> None:
        self.cluster = cluster
        self.flips: dict[str, list[Flip]] = {f"server{i}": [] for i in range(2)}
        for id, flips in self.flips.items():
            server = FlippingServer(
                flips, id=id, coordinator=cluster.coordinator.address, bind="server:0", transport=cluster.transport
            )
            server.start()
            cluster.servers.append(server)

    def run(self, array: int, primary: bool, **settings: Any) -> tuple[str, str]:
        """Train; returns the hash, and the server in whose memory the bit has flipped."""
        flipped = list[str]()

        def flip() -> None:
            machine = self.cluster.coordinator._shell.machine
            until(lambda: machine.exposed == 0 or machine.terms.replication == 1, "a shard never had a backup")
            assert machine.view is not None
            flipped.append((machine.view.primary if primary else machine.view.backup)[SHARD])
            self.flips[flipped[0]].append(Flip(SHARD, 1, array, word=5, bit=20, primary=primary))

        once = Once(STEP, 1, flip)
        worker = self.cluster.add_worker(once, **settings)
        return worker.result(), flipped[0]


@pytest.mark.some("exp_avg_sq-True")
@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("array", range(3), ids=NAMES)
def test_a_server_finds_a_flip_in_its_own_memory_and_is_given_up(undisturbed: str, array: int, primary: bool) -> None:
    with two_servers(replication=2) as cluster:
        got, server = Faulty(cluster).run(array, primary, audit_servers=1)
        assert got == undisturbed
        (found,) = cluster.heard(ServerMismatch)
        assert (found.shard, found.servers) == (SHARD, (server,))
        assert f"has changed in the memory of {server} on " in found.text
        assert any(said.startswith(f"{server} is gone: shard {SHARD} at version") for said in cluster.sentences())
        assert not [said for said in cluster.sentences() if "going back" in said or "goes back" in said]


@pytest.mark.some("False-master")
@pytest.mark.parametrize("array", [0, 2], ids=[NAMES[0], NAMES[2]])
@pytest.mark.parametrize("primary", [True, False])
def test_two_servers_that_differ_go_back_to_the_last_snapshot(
    undisturbed: str, tmp_path: Path, array: int, primary: bool
) -> None:
    """Between audited versions a flip is found when the backup acknowledges other bytes: who is right is not known."""
    with two_servers(tmp_path, replication=2, snapshot_steps=2, snapshot_seconds=0.0) as cluster:
        got, _ = Faulty(cluster).run(array, primary, audit_servers=1000)
        assert got == undisturbed
        (found,) = cluster.heard(ServerMismatch)
        assert found.shard == SHARD
        assert set(found.servers) == {"server0", "server1"}
        assert f"hold other bytes of shard {SHARD}" in found.text
        assert any("goes back to the last snapshot" in said for said in cluster.sentences())


def test_without_a_backup_the_job_goes_back_to_the_last_snapshot(undisturbed: str, tmp_path: Path) -> None:
    with two_servers(tmp_path, replication=1, snapshot_steps=2, snapshot_seconds=0.0) as cluster:
        got, server = Faulty(cluster).run(2, True, audit_servers=1)
        assert got == undisturbed
        (found,) = cluster.heard(ServerMismatch)
        assert found.servers == (server,)
        assert any("going back to the last snapshot" in said for said in cluster.sentences())
