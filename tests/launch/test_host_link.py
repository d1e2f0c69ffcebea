"""The connection to a host: programs that hang, or leave something behind, hold nobody up."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.far_end import GREETING, BeginHost, Ready, Unpack
from rallypoint.launch.engines.remote import HostLink, RemoteProcess, RemoteShell
from rallypoint.launch.plan import Host

PATIENCE_S = 60.0
BEGIN = BeginHost("/run", "/", (), sys.executable, "/package", "{host}")
FAR_END = "rallypoint.launch.engines.far_end"
SEES = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(1000)"
# It greets and is ready, and then reads nothing more: a machine that hangs, while its sshd still answers.
DEAF = f"""
import sys, time
sys.stdin.buffer.readline()
print({GREETING!r}, flush=True)
print('{{"type": "Ready", "sees": []}}', flush=True)
time.sleep(1000)
"""


def promptly(act: Callable[[], object]) -> None:
    """Call this; AssertionError if it does not return."""
    (thread := threading.Thread(target=act, daemon=True)).start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it does not return"


def link_to(argv: list[str], judged: str | Unpack | None = None) -> HostLink:
    def judge(host: Host, ready: Ready) -> str | Unpack | None:
        return judged

    return HostLink(Host("a"), RemoteShell("fake", lambda host: argv, None, "?"), BEGIN, judge)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = psutil.Process().children(recursive=True)
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=PATIENCE_S)


def test_a_host_that_reads_nothing_is_given_up_all_the_same() -> None:
    link = link_to([sys.executable, "-c", DEAF], Unpack(bytes(4 << 20)))  # more than any pipe takes
    link.connect()
    assert not link.settled(1.0)
    promptly(link.close)
    promptly(lambda: link.join(time.monotonic() + PATIENCE_S))
    assert link.failed_at is not None


def test_signals_to_a_host_that_reads_nothing_hold_nobody_up() -> None:
    link = link_to([sys.executable, "-c", DEAF])
    command = Command(name="worker0", role="worker", argv=("x" * (4 << 20),))
    process = RemoteProcess(command, 1, link, lambda line: None)
    promptly(lambda: link.run(process))
    assert link.settled(PATIENCE_S)
    promptly(lambda: process.signal(15))
    promptly(link.close)
    promptly(lambda: link.join(time.monotonic() + 0.5))
    how = process.exit()
    assert how.signal == "SIGHUP"


def test_what_a_killed_client_has_started_ends_with_it_and_holds_nobody_up(tmp_path: Path) -> None:
    """As the ProxyCommand of an ssh does, which holds its standard error."""
    started = tmp_path / "started"
    script = f"sleep 1000 & echo $! > {started}; exec sleep 1000"
    link = link_to(["sh", "-c", script])
    link.connect()
    while not (started.exists() and started.read_text().strip()):
        assert not link.settled(0.01)
    proxy = psutil.Process(int(started.read_text()))
    promptly(lambda: link.join(time.monotonic()))
    assert psutil.wait_procs([proxy], timeout=PATIENCE_S)[1] == []


def test_each_worker_of_a_host_sees_another_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one machine: what is started there does not know of its neighbours."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    begin = BeginHost(str(tmp_path), str(tmp_path), (), sys.executable, "", "{host}")
    shell = RemoteShell("fake", lambda host: [sys.executable, "-P", "-m", FAR_END], None, "?")
    link, lines = HostLink(Host("a"), shell, begin, lambda host, ready: None), queue.SimpleQueue[str]()
    for number in range(2):
        command = Command(name=f"worker{number}", role="worker", argv=(sys.executable, "-c", SEES))
        link.run(RemoteProcess(command, number + 1, link, lines.put))
    assert link.settled(PATIENCE_S), link
    assert sorted(lines.get(timeout=PATIENCE_S) for _ in range(2)) == ["3", "5"]
    promptly(link.close)
    promptly(lambda: link.join(time.monotonic() + PATIENCE_S))
