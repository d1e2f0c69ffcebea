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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from rallypoint.errors import UsageError
from rallypoint.launch import launcher
from rallypoint.launch import run as cluster_run
from rallypoint.launch.ask import resize
from rallypoint.launch.cluster import Handle
from rallypoint.launch.console import RunConsole
from rallypoint.launch.folder import read_where
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import ClusterRun
from rallypoint.launch.supervisor import Limits
from rallypoint.net.messages import Finished, Message
from rallypoint.testing.programs import run_program

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parent.parent
LONG_RUN = """
import torch, rallypoint as rp
torch.manual_seed(0)
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
    monkeypatch.setattr(cluster_run, "LIMITS", Limits(quick_deaths=3))
    said = io.StringIO()
    plan = Launch(
        worker=(sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), workers=(1, 1),
        workers_start=1, servers=1, folder=str(tmp_path / "run"),
    )  # fmt: skip
    assert launcher.launch(plan, RunConsole(Console(file=said, width=1000, highlight=False))) == 1
    output = said.getvalue()
    assert output.count("was killed (SIGKILL): starting another") == 3
    assert "failed: worker3 was killed (SIGKILL); it is not started again: 4 workers in a row died soon" in output


SHORT_RUN = LONG_RUN.replace("10**9", "20")


class _Deaf(RunConsole):
    """Does not hear from the coordinator itself that the job is over: the link was down just then."""

    def show(self, message: Message) -> None:
        if not isinstance(message, Finished) or threading.current_thread() is threading.main_thread():
            super().show(message)


def test_a_run_whose_last_word_did_not_come_through_has_not_failed(tmp_path: Path) -> None:
    said = io.StringIO()
    plan = Launch(
        worker=(sys.executable, "-c", SHORT_RUN), workers=(1, 1), workers_start=1, servers=1, folder=str(tmp_path)
    )
    assert launcher.launch(plan, _Deaf(Console(file=said, width=1000, highlight=False))) == 0
    assert "done: 20 steps" in said.getvalue()


def test_a_coordinator_that_is_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_run, "_SILENCE_S", 0.5)
    said, sentence = io.StringIO(), "nothing has been heard from the coordinator"
    stopped: list[int] = []
    deadline = time.monotonic() + 60.0
    plan = Launch(
        worker=(sys.executable, "-c", LONG_RUN), workers=(1, 1), workers_start=1, servers=1, folder=str(tmp_path)
    )

    def intervene(run: ClusterRun) -> None:
        (coordinator,) = run.of_role("coordinator")
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


# ---- what may happen to a run ----


class Played:
    """A run in this process, with what it printed; `intervene` is called while it runs."""

    def __init__(self, tmp_path: Path, script: str, *, workers: int = 1, name: str = "run", **plan: Any) -> None:
        self.folder, self.script = tmp_path / name, tmp_path / "script.py"
        self.script.write_text(script)
        self._said = io.StringIO()
        self.plan = Launch(**{
            "worker": (sys.executable, str(self.script)), "script": str(self.script), "workers": (1, workers),
            "workers_start": workers, "servers": 1, "folder": str(self.folder),
            "snapshots": str(self.folder / "snapshots"), **plan,
        })  # fmt: skip

    @property
    def said(self) -> str:
        return self._said.getvalue()

    def run(self, intervene: Callable[[ClusterRun], None] | None = None, **how: bool) -> int:
        console = RunConsole(Console(file=self._said, width=1000, highlight=False))
        return launcher.launch(self.plan, console, intervene, **how)


# Replica 1 of a step waits until the gate's file has a higher number.
GATED = """
import sys, time
from pathlib import Path
import torch, rallypoint as rp
from rallypoint.worker.tensors import weights_hash
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Linear(30, 3))
data = torch.utils.data.TensorDataset(torch.randn(50, 6))
gate = Path(__file__).parent / "gate"
with rp.join() as job:
    run = job.train(model, data, replicas=2, batch=4, steps=12, shard_bytes=128, optimizer=rp.AdamW(lr=1e-2))
    for micro in run:
        with micro:
            loss = model(micro.batch[0]).square().mean()
            while micro.replica == 1 and micro.step >= int(gate.read_text()):
                time.sleep(0.005)
                model[-1](model[0](micro.batch[0]))  # a roll-back ends it here
            micro.backward(loss)
    if run.lead:
        (run.folder / "hash").write_text(weights_hash(model))
"""


def until(*moves: Callable[[ClusterRun], bool]) -> Callable[[ClusterRun], None]:
    """Each move is asked again and again until it has been made."""
    left, deadline = list(moves), time.monotonic() + 90.0

    def intervene(run: ClusterRun) -> None:
        if left and left[0](run):
            left.pop(0)
        assert time.monotonic() < deadline, f"{len(left)} moves were not made"

    return intervene


def at_step(step: int) -> Callable[[ClusterRun], bool]:
    return lambda run: run.console.steps_done >= step


def opens(gate: Path, step: int) -> Callable[[ClusterRun], bool]:
    def move(run: ClusterRun) -> bool:
        new = gate.with_suffix(".new")
        new.write_text(str(step))
        new.replace(gate)  # nobody reads half of it
        return True

    return move


def kills(name: str) -> Callable[[ClusterRun], bool]:
    """Made when that process has ended."""
    victims: list[Handle] = []

    def move(run: ClusterRun) -> bool:
        if not victims and name in run.handles:
            victims.append(run.handles[name])
            victims[0].signal(signal.SIGKILL)
        return bool(victims) and run.handles.get(name) is not victims[0]

    return move


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "gate").write_text("99")
    played = Played(folder, GATED)
    assert played.run() == 0, played.said
    return (played.folder / "hash").read_text()


def test_a_coordinator_killed_as_soon_as_it_is_started_again_is_started_once_more(
    tmp_path: Path, undisturbed: str
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("5")
    played = Played(tmp_path, GATED)
    five_times = [kills("coordinator") for _ in range(5)]
    assert played.run(until(at_step(5), *five_times, opens(gate, 99))) == 0, played.said
    assert played.said.count("coordinator was killed (SIGKILL): starting another") == 5
    assert (played.folder / "hash").read_text() == undisturbed


def test_a_coordinator_that_is_given_up_is_named_with_the_way_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_run, "LIMITS", Limits(quick_deaths=1, quick_s=1e9))
    (tmp_path / "gate").write_text("5")
    played = Played(tmp_path, GATED)
    assert played.run(until(at_step(5), kills("coordinator"), kills("coordinator"))) == 1
    assert (
        "failed: coordinator was killed (SIGKILL); it is not started again: 2 times in a row the coordinator died soon"
        in played.said
    )
    assert f"to go on from the last snapshot: rallypoint resume {played.folder}" in played.said


def test_a_replacement_runs_the_code_that_the_run_began_with(tmp_path: Path, undisturbed: str) -> None:
    gate = tmp_path / "gate"
    gate.write_text("5")
    played = Played(tmp_path, GATED)

    def edits(run: ClusterRun) -> bool:
        return played.script.write_text("this is no Python") > 0

    moves = (at_step(5), edits, kills("worker0"), lambda run: "worker1" in run.supervisor.took_part, opens(gate, 99))
    assert played.run(until(*moves)) == 0, played.said
    assert (played.folder / "hash").read_text() == undisturbed
    assert played.said.count("edited since the run began: script.py; worker1 runs the code that the run began") == 1


def test_a_job_is_resized_while_it_runs_and_ends_with_the_same_bytes(tmp_path: Path, undisturbed: str) -> None:
    gate = tmp_path / "gate"
    gate.write_text("4")
    played = Played(tmp_path, GATED)
    answers: list[str] = []

    def ordered(workers: int, servers: int) -> list[Callable[[ClusterRun], bool]]:
        order = threading.Thread(
            target=lambda: answers.append(resize(played.folder, workers, servers, lambda text: None))
        )

        def begins(run: ClusterRun) -> bool:
            order.start()
            return True

        return [begins, lambda run: not order.is_alive()]

    moves = [at_step(4), *ordered(2, 2), opens(gate, 8), at_step(8), *ordered(1, 1), opens(gate, 99)]
    assert played.run(until(*moves)) == 0, played.said
    assert [answer.partition(": ")[2] for answer in answers] == ["2 workers and 2 servers", "1 worker and 1 server"]
    assert "going back" not in played.said
    assert (played.folder / "hash").read_text() == undisturbed


def test_a_worker_joined_by_hand_takes_part_and_ends_well(tmp_path: Path, undisturbed: str) -> None:
    gate = tmp_path / "gate"
    gate.write_text("5")
    played = Played(tmp_path, GATED, workers=2, workers_start=1)
    started: list[subprocess.Popen[str]] = []

    def by_hand(run: ClusterRun) -> bool:
        where = read_where(played.folder)
        env = {**os.environ, "RALLYPOINT_COORDINATOR": where.coordinator, "RALLYPOINT_TOKEN": where.token,
               "RALLYPOINT_ID": "mine", "OMP_NUM_THREADS": "1"}  # fmt: skip
        argv = [sys.executable, str(played.script)]
        started.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return True

    def drop_one(run: ClusterRun) -> bool:  # so that `mine` computes
        run.supervisor.wanted["worker"] = 1
        run.handles["worker1"].signal(signal.SIGTERM)
        return True

    def computes(run: ClusterRun) -> bool:
        return run.console.members is not None and "mine" in run.console.members.workers

    assert played.run(until(at_step(5), by_hand, lambda run: "mine" in run.supervisor.took_part, drop_one, computes,
                            opens(gate, 99))) == 0, played.said  # fmt: skip
    output, _ = started[0].communicate(timeout=60)
    assert (started[0].returncode, output) == (0, "")
    assert (played.folder / "hash").read_text() == undisturbed


def test_a_run_is_not_started_over_another_one(tmp_path: Path) -> None:
    played = Played(tmp_path, SHORT_RUN)
    assert played.run() == 0
    plan = (played.folder / "run.json").read_bytes()
    with pytest.raises(UsageError, match="holds a finished run of 20 steps: choose another --folder, or --overwrite"):
        played.run()
    assert (played.folder / "run.json").read_bytes() == plan
    assert played.run(overwrite=True) == 0
    assert played.said.count("done: 20 steps") == 2


def test_a_resumed_run_says_what_has_changed_and_runs_it_or_what_it_began_with(tmp_path: Path) -> None:
    (tmp_path / "gate").write_text("5")
    played = Played(tmp_path, GATED)

    def interrupts(run: ClusterRun) -> bool:
        raise KeyboardInterrupt

    assert played.run(until(at_step(5), interrupts)) == launcher.INTERRUPTED
    assert f"to go on from the last snapshot: rallypoint resume {played.folder}" in played.said
    played.script.write_text("raise ValueError('edited')\n")
    (tmp_path / "gate").write_text("99")
    snapshot = sorted(path.name for path in (played.folder / "snapshots").iterdir() if path.is_dir())[0]
    played.plan = msgspec.structs.replace(played.plan, resume=snapshot)
    assert played.run(original=True) == 0, played.said
    assert "changed since the run began: script.py. The code runs as it was (--original)" in played.said
    assert played.run() == 1
    assert "changed since the run began: script.py. The code runs as it is now" in played.said
    assert "ValueError: edited" in played.said


def test_a_traceback_is_printed_once_and_the_others_are_named(tmp_path: Path) -> None:
    played = Played(tmp_path, SHORT_RUN.replace("micro.backward", "boom"), workers=2)
    assert played.run() == 1
    assert played.said.count("Traceback (most recent call last):") == 1
    assert played.said.count("NameError: name 'boom' is not defined\n") >= 1
    assert "failed: worker" in played.said
    assert "KeyboardInterrupt" not in played.said


def test_a_script_that_fails_before_it_joins_ends_the_run_with_one_traceback(tmp_path: Path) -> None:
    played = Played(tmp_path, "import nowhere_to_be_found\n", workers=3, servers=2)
    assert played.run() == 1
    assert played.said.count("ModuleNotFoundError: No module named 'nowhere_to_be_found'") == 1
    assert "ended with the same error as worker" in played.said
    assert "ended with status 1" in played.said
    assert "waiting for" not in played.said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_one_sentence(tmp_path: Path, number: int) -> None:
    with running(tmp_path, LONG_RUN) as (launcher, _):
        launcher.send_signal(number)
        output, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    rest = [line for line in output.splitlines() if not line.startswith("step ")]
    assert rest == [
        "interrupted: every process has been ended",
        f"to go on from the last snapshot: rallypoint resume {tmp_path / 'run'}",
    ]


def test_nobody_reading_the_output_ends_the_run_quietly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LONG_RUN)
    argv = command("run", "--workers", "1", "--servers", "1", "--folder", str(tmp_path / "run"), str(script))
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(timeout=60) == 141
    assert launcher.stderr.read() == b""
    launcher.stderr.close()
