"""What processes print is passed on in bounded portions; nothing that happens to the output ends a process."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rallypoint.launch.console import Output, RunConsole
from rallypoint.launch.engines.cluster import Command, Exit
from rallypoint.launch.engines.discovery import SUPERVISION, FoundJob, Place, RankDuties
from rallypoint.launch.engines.local import LineRelay, LocalCluster
from rallypoint.launch.environment import LISTENS_AT, failure_line
from rallypoint.launch.observing.beside import Companion
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import ClusterRun

PATIENCE_S = 60.0
FLOOD = "import itertools\nfor n in itertools.count(): print('line', n)"
COUNT = "for n in range(20_000): print('line', n)"


def test_who_puts_waits_for_room_and_not_once_the_relay_is_open() -> None:
    relay, put = LineRelay(most=20), threading.Event()

    def print_lines() -> None:
        for n in range(4):
            relay.put("worker0", f"line {n} ...")
        put.set()

    (thread := threading.Thread(target=print_lines)).start()
    while len(relay) < 2:
        time.sleep(0.001)
    assert not put.is_set()
    assert relay.take() == ("worker0", "line 0 ...")
    relay.open()
    thread.join(PATIENCE_S)
    assert put.is_set()
    assert [relay.take()[1] for _ in range(len(relay))] == [f"line {n} ..." for n in (1, 2, 3)]
    with pytest.raises(IndexError):
        relay.take()


def test_what_a_coordinator_tells_the_launcher_waits_behind_no_output(tmp_path: Path) -> None:
    """A worker prints faster than its lines can be shown; who goes on, or ends, must not wait for that."""
    outputs: dict[str, Callable[[str], None]] = {}
    cluster: Any = SimpleNamespace(start=lambda command, output: outputs.setdefault(command.name, output))
    said = io.StringIO()
    run = ClusterRun(Launch(worker=("true",), folder=str(tmp_path)), RunConsole(Console(file=said)), cluster)
    for name, role in (("worker0", "worker"), ("coordinator", "coordinator")):
        run._start(name, role)
    outputs["worker0"]("loss 0.25")
    outputs["coordinator"](f"{LISTENS_AT}127.0.0.1:9")
    outputs["coordinator"](failure_line("worker1: no"))
    taken = [run._lines.take() for _ in range(len(run._lines))]
    assert [name for name, _ in taken] == ["coordinator", "coordinator", "worker0"]
    assert taken[0][1] == f"{LISTENS_AT}127.0.0.1:9"
    full = LineRelay(most=1)
    full.put("worker0", "fills it")
    full.put("coordinator", "told", first=True)  # does not wait
    assert [full.take()[1] for _ in range(len(full))] == ["told", "fills it"]


def test_a_process_that_prints_faster_than_its_lines_are_taken_loses_none_and_its_end_comes_after_them() -> None:
    """The thread that takes the lines is the one that asks how the process has ended, as in the launcher."""
    relay, said, most = LineRelay(most=5_000), list[str](), 0
    with LocalCluster() as cluster:
        command = Command(name="worker0", role="worker", argv=(sys.executable, "-c", COUNT))
        process = cluster.start(command, lambda line: relay.put("worker0", line))
        while (how := process.exit()) is None:
            most = max(most, len(relay))
            said += [relay.take()[1] for _ in range(min(100, len(relay)))]
        said += [relay.take()[1] for _ in range(len(relay))]
    assert how == Exit(0)
    assert said == [f"line {n}" for n in range(20_000)]
    assert most < 1_000


def test_a_cluster_ends_while_a_process_floods_and_nobody_takes_its_lines() -> None:
    relay = LineRelay(most=100)
    with LocalCluster() as cluster:
        command = Command(name="worker0", role="worker", argv=(sys.executable, "-c", FLOOD))
        process = cluster.start(command, lambda line: relay.put("worker0", line))
        while not len(relay):
            time.sleep(0.001)
        relay.open()
    assert process.exit() == Exit(137, "SIGKILL")


def test_of_a_companion_that_floods_a_few_lines_are_shown_and_the_others_counted() -> None:
    companion = Companion("watch", "run", what="the page cannot be served")
    with LocalCluster() as cluster:
        command = Command(name="watch", role="observer", argv=(sys.executable, "-c", COUNT))
        cluster.start(command, companion._keep).wait()
    left_out = "(19900 more lines of `rallypoint watch` were left out)"
    assert companion.said() == [*(f"line {n}" for n in range(100)), left_out]
    companion._keep("one more")
    assert companion.said() == []  # until a while has gone by


def test_what_looks_like_an_error_without_an_end_is_shown() -> None:
    output = Output()
    shown = list(output.line("worker0", "error: 0.25", 0.0))
    for n in range(30_000):
        shown += output.line("worker0", f"line {n}", 0.0)
    assert [line.text for line in shown[:2]] == ["error: 0.25", "line 0"]
    assert len(shown) > 20_000
    assert all(len(held.lines) < 10_000 for held in output._held.values())


def test_under_torchrun_a_line_that_stdout_cannot_encode_ends_nothing() -> None:
    script = "import sys\nsys.stdout.buffer.write(b'loss \\xff 1.0\\n')\nsys.stdout.flush()\n" + COUNT
    place = Place(launcher="torchrun", rank=1, world=2, local_rank=1, nodes=1, attempt="1")
    duties = RankDuties(place=place, worker=(sys.executable, "-c", script), found=FoundJob("127.0.0.1:9", ""))
    argv = [sys.executable, "-P", "-m", SUPERVISION, msgspec.json.encode(duties).decode()]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    said = done.stdout.decode("latin-1").splitlines()
    assert (done.returncode, said[0], len(said)) == (0, "loss ? 1.0", 20_001), said[:9]


@pytest.mark.slow
def test_a_launcher_takes_sigterm_while_a_worker_prints_without_end(tmp_path: Path) -> None:
    (tmp_path / "flood.py").write_text(FLOOD)
    argv = [sys.executable, "-m", "rallypoint.cli", "run", "--workers", "1", "--servers", "1", "flood.py"]
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen(
            argv, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while "line 1000" not in (tmp_path / "said").read_text():
            assert launcher.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.01)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(PATIENCE_S) == 130
    finally:
        launcher.kill()
        launcher.wait()
    assert "interrupted by SIGTERM: every process has been ended" in (tmp_path / "said").read_text()[-2000:]
