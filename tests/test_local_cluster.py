"""Processes of a local cluster, and what they leave: their own children, their output, a coordinator that hangs."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rallypoint.launch import local
from rallypoint.launch.local import ChildFailed, LocalCluster

PATIENCE_S = 20.0
# A worker that has started a process of its own, which holds its output open, as a data loader or a dashboard does.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def lines() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def cluster(lines: list[tuple[str, str]]) -> Iterator[LocalCluster]:
    with LocalCluster(token="0" * 32, threads=1, relay=lambda name, line: lines.append((name, line))) as cluster:
        yield cluster


def grandchild(lines: list[tuple[str, str]]) -> psutil.Process:
    deadline = time.monotonic() + PATIENCE_S
    while not lines:
        assert time.monotonic() < deadline, "it has not begun"
        time.sleep(0.01)
    return psutil.Process(int(lines[0][1]))


def test_what_a_killed_worker_had_started_holds_nobody_up_and_does_not_outlive_it(
    cluster: LocalCluster, lines: list[tuple[str, str]]
) -> None:
    """As by the out-of-memory killer, which takes one process and not its group."""
    worker = cluster.start_worker("worker0", [sys.executable, "-c", PARENT])
    left = grandchild(lines)
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait(PATIENCE_S)
    cluster.forget(worker)
    assert psutil.wait_procs([left], timeout=PATIENCE_S)[1] == []
    assert cluster.children == []
    assert not worker.reader.is_alive()


def test_the_end_of_a_cluster_is_the_end_of_what_its_workers_started(
    cluster: LocalCluster, lines: list[tuple[str, str]]
) -> None:
    worker = cluster.start_worker("worker0", [sys.executable, "-c", PARENT])
    left = grandchild(lines)
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait(PATIENCE_S)
    cluster.end()
    assert psutil.wait_procs([left], timeout=PATIENCE_S)[1] == []


def test_a_coordinator_that_never_listens_is_a_sentence(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "_ANNOUNCE_TIMEOUT_S", 0.05)
    slow = tmp_path / "slow"
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(1000)\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    with pytest.raises(ChildFailed, match=r"the coordinator has not begun to listen within 0 s"):
        cluster.start_coordinator([])


def test_a_coordinator_that_ends_before_it_listens_is_a_sentence(cluster: LocalCluster) -> None:
    with pytest.raises(ChildFailed, match="the coordinator did not start; its own message is above"):
        cluster.start_coordinator(["--terms", "no json"])
