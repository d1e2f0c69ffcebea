"""The launcher on real processes: what a person starts, sees, and ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from rallypoint.launch import launcher
from rallypoint.launch.console import RunConsole
from rallypoint.net.messages import Finished, Message
from rallypoint.testing.programs import run_program

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parent.parent
LONG_RUN = """
import torch, rallypoint as rp
model = torch.nn.Linear(4, 4)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
with rp.join() as job:
    for micro in job.train(model, data, replicas=2, batch=4, steps=10**9):
        with micro:
            micro.backward(model(micro.batch[0]).square().mean())
"""
WIDE_RUN = """
import torch, rallypoint as rp
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(768, 768) for _ in range(8)])
data = torch.utils.data.TensorDataset(torch.randn(512, 768))
with rp.join() as job:
    for micro in job.train(model, data, replicas=2, batch=128, steps=8, optimizer=rp.SGD(lr=0.0)):
        with micro:
            micro.backward(model(micro.batch[0]).square().mean())
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rallypoint.cli", *arguments]


@contextmanager
def running(tmp_path: Path, script: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A long run that has begun to train, and all of its children."""
    path = tmp_path / "script.py"
    path.write_text(script)
    argv = command("run", "--workers", "2", "--servers", "2", "--folder", str(tmp_path / "run"), str(path))
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    children: list[psutil.Process] = []
    try:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if line.startswith("step "):
                break
        children = psutil.Process(launcher.pid).children(recursive=True)
        yield launcher, children
    finally:
        launcher.kill()
        launcher.communicate()
        for child in children:
            if child.is_running():
                child.kill()


def listening_ports(processes: list[psutil.Process]) -> set[int]:
    return {c.laddr.port for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_launcher_leaves_no_process_and_no_port(tmp_path: Path, number: int) -> None:
    with running(tmp_path, LONG_RUN) as (launcher, children):
        ports = listening_ports(children)
        assert len(children) == 5
        assert len(ports) == 3  # the coordinator and two servers
        launcher.send_signal(number)
        launcher.wait(timeout=20)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
        assert launcher.returncode == (130 if number != signal.SIGKILL else -signal.SIGKILL)
        assert not ports & {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_workers_that_die_again_and_again_end_the_job_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(launcher, "_QUICK_DEATHS", 4)
    said = io.StringIO()
    plan = launcher.Launch(
        worker=(sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), workers=(1, 1),
        workers_start=1, servers=1, folder=str(tmp_path / "run"),
    )  # fmt: skip
    assert launcher.launch(plan, RunConsole(Console(file=said, width=1000, highlight=False))) == 1
    output = said.getvalue()
    assert output.count("was killed (SIGKILL): starting another") == 4
    assert "failed: worker4 was killed (SIGKILL); it is not started again: 5 workers in a row died soon" in output


SHORT_RUN = LONG_RUN.replace("10**9", "20")


class _Deaf(RunConsole):
    """Does not hear from the coordinator itself that the job is over: the link was down just then."""

    def show(self, message: Message) -> None:
        if not isinstance(message, Finished) or threading.current_thread() is threading.main_thread():
            super().show(message)


def test_a_run_whose_last_word_did_not_come_through_has_not_failed(tmp_path: Path) -> None:
    said = io.StringIO()
    plan = launcher.Launch(
        worker=(sys.executable, "-c", SHORT_RUN), workers=(1, 1), workers_start=1, servers=1, folder=str(tmp_path)
    )
    assert launcher.launch(plan, _Deaf(Console(file=said, width=1000, highlight=False))) == 0
    assert "done: 20 steps" in said.getvalue()


def test_a_coordinator_that_is_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_SILENCE_S", 0.5)
    said, sentence = io.StringIO(), "nothing has been heard from the coordinator"
    stopped: list[int] = []
    deadline = time.monotonic() + 60.0
    plan = launcher.Launch(
        worker=(sys.executable, "-c", LONG_RUN), workers=(1, 1), workers_start=1, servers=1, folder=str(tmp_path)
    )

    def intervene(run: launcher.LocalRun) -> None:
        (coordinator,) = run.cluster.of_role("coordinator")
        if not stopped and run.console.steps_done > 0:
            stopped.append(said.getvalue().count(sentence))
            coordinator.signal(signal.SIGSTOP)
        elif stopped and said.getvalue().count(sentence) > stopped[0]:
            coordinator.signal(signal.SIGCONT)
            raise KeyboardInterrupt
        assert time.monotonic() < deadline, said.getvalue()

    console = RunConsole(Console(file=said, width=1000, highlight=False))
    assert launcher.launch(plan, console, intervene) == launcher.INTERRUPTED


def test_a_script_of_ones_own_trains_on_a_cluster_and_alone(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "digits.py")
    folder = tmp_path / "run"
    options = ("--workers", "2", "--servers", "2", "--set", "steps=60", "--folder", str(folder))
    argv = ["-m", "rallypoint.cli", "run", *options, script]
    status, said = run_program(argv, tmp_path / "output", env=os.environ, timeout=100)
    assert status == 0, said
    assert "done: 60 steps" in said
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["type"] == "StepDone"] == list(range(60))
    assert [e["step"] for e in events if e["type"] == "Metrics"] == [50, 60]
    status, said = run_program([script], tmp_path / "output", env=os.environ, timeout=100)
    assert status == 0, said
    assert "done: 200 steps" in said


def test_the_trace_of_a_step_shows_pushes_that_leave_during_backward(tmp_path: Path) -> None:
    script, trace = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text(WIDE_RUN)
    options = ("--folder", str(tmp_path / "run"), "--trace", str(trace), "--trace-steps", "3:6")
    argv = ["-m", "rallypoint.cli", "run", *options, str(script)]
    status, said = run_program(argv, tmp_path / "output", env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=100)
    assert status == 0, said
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert set(processes.values()) == {"worker0", "worker1", "server0", "server1"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {"backward", "send", "receive", "reduce", "apply", "pull", "install", "wait"} <= {s["name"] for s in spans}
    for backward in (s for s in spans if s["name"] == "backward"):
        start, end = backward["ts"], backward["ts"] + backward["dur"]
        pushes = [
            s for s in spans
            if s["pid"] == backward["pid"] and s["name"] == "send" and s["args"]["kind"] == "PUSH"
            and start <= s["ts"] < end
        ]  # fmt: skip
        assert pushes, "no gradient left before the backward pass was over"
