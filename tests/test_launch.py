"""The launcher on real processes: what a person starts, sees, and ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from rallypoint.coordinator.journal import Journal
from rallypoint.core.protocol import Finished, Hello, Members, Message, SnapshotWanted
from rallypoint.errors import UnprovenPeer, UsageError
from rallypoint.launch import lifeline, run
from rallypoint.launch import run as cluster_run
from rallypoint.launch.commands.ask import resize
from rallypoint.launch.console import RunConsole, Screen
from rallypoint.launch.engines.cluster import Cluster, Command, Exit, Handle
from rallypoint.launch.engines.local import LineRelay, LocalCluster
from rallypoint.launch.folder import read_where
from rallypoint.launch.plan import Launch, read_plan
from rallypoint.launch.run import ClusterRun
from rallypoint.net.handshake import COORDINATOR, introduce
from rallypoint.net.tcp import TcpTransport
from rallypoint.store.files import END_PATIENCE_S
from support.beside import raising
from support.beside import until as until_true
from support.members import script
from support.programs import Program, run_program

pytestmark = pytest.mark.programs

LONG_RUN = script()
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
def running(tmp_path: Path, script: str) -> Iterator[tuple[Program, list[psutil.Process]]]:
    """A long run that has begun to train, and all of its children. It prints into the file `output`."""
    path, output = tmp_path / "script.py", tmp_path / "output"
    path.write_text(script)
    argv = ["-m", "rallypoint.cli", "run", "--workers", "2", "--servers", "2", "--folder", str(tmp_path / "run")]
    run = Program([*argv, str(path)], output, os.environ)
    children: list[psutil.Process] = []
    try:
        until_true(lambda: output.exists() and "\nstep " in output.read_text())
        children = psutil.Process(run.pid).children(recursive=True)
        yield run, children
    finally:
        run.kill()
        run.wait()
        for child in children:
            if child.is_running():
                child.kill()


def listening_ports(processes: list[psutil.Process]) -> set[int]:
    return {c.laddr.port for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_launcher_leaves_no_process_and_no_port(tmp_path: Path, number: int) -> None:
    with running(tmp_path, LONG_RUN) as (run, children):
        ports = listening_ports(children)
        assert len(children) == 5
        assert len(ports) == 3  # the coordinator and two servers
        run.send_signal(number)
        run.wait(timeout=20)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
        assert run.returncode == (130 if number != signal.SIGKILL else -signal.SIGKILL)
        assert not ports & {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


SHORT_RUN = script(20)


class _Deaf(RunConsole):
    """Does not hear from the coordinator itself that the job is over: the link was down just then."""

    def show(self, message: Message) -> None:
        if not isinstance(message, Finished) or threading.current_thread() is threading.main_thread():
            super().show(message)


@pytest.mark.slow
def test_a_run_whose_last_word_did_not_come_through_has_not_failed(tmp_path: Path) -> None:
    said = io.StringIO()
    plan = Launch(
        worker=(sys.executable, "-c", SHORT_RUN), workers=(1, 1), workers_start=1, servers=1, folder=str(tmp_path)
    )
    assert run.launch(plan, _Deaf(Console(file=said, width=1000, highlight=False))) == 0
    assert "done: 20 steps" in said.getvalue()


@pytest.mark.slow
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
        if not stopped and run.console.state.step > 0:
            stopped.append(said.getvalue().count(sentence))
            coordinator.signal(signal.SIGSTOP)
        elif stopped and said.getvalue().count(sentence) > stopped[0]:
            coordinator.signal(signal.SIGCONT)
            raise KeyboardInterrupt
        assert time.monotonic() < deadline, said.getvalue()

    console = RunConsole(Console(file=said, width=1000, highlight=False))
    assert run.launch(plan, console, intervene) == run.INTERRUPTED


@pytest.mark.slow
def test_the_trace_of_a_step_shows_pushes_that_leave_during_backward(tmp_path: Path) -> None:
    script, trace = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text(WIDE_RUN)
    options = ("--folder", str(tmp_path / "run"), "--trace", f"{trace}@3:6")
    argv = ["-m", "rallypoint.cli", "run", *options, str(script)]
    status, said = run_program(argv, tmp_path / "output", env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240)
    assert status == 0, said
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert set(processes.values()) == {"worker0", "worker1", "server0", "server1"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {"backward", "send", "receive", "reduce", "apply", "pull", "install", "wait"} <= {s["name"] for s in spans}
    left: dict[int, int] = {s["pid"]: 0 for s in spans if s["name"] == "backward"}
    for backward in (s for s in spans if s["name"] == "backward"):
        start, end = backward["ts"], backward["ts"] + backward["dur"]
        left[backward["pid"]] += sum(
            s["pid"] == backward["pid"] and s["name"] == "send" and s["args"]["kind"] == "PUSH"
            and start <= s["ts"] < end
            for s in spans
        )
    # In one of the three steps at least: in a short one the sending thread may get no processor
    assert all(left.values()), f"no gradient left before the backward pass was over: {left}"


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

    def run(self, intervene: Callable[[ClusterRun], None] = lambda run: None, **how: bool) -> int:
        console = RunConsole(Console(file=self._said, width=1000, highlight=False))
        return run.launch(self.plan, console, intervene, **how)


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
    run = job.train(
        model, data, replicas=2, batch=4, steps=12, network=rp.Network(shard_bytes=128), optimizer=rp.AdamW(lr=1e-2)
    )
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
    return lambda run: run.console.state.step >= step


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


def test_a_signal_that_the_launcher_was_started_to_ignore_stays_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_it_ran: list[Any] = []

    def started(plan: Launch, say: Any) -> Any:
        while_it_ran.extend(map(signal.getsignal, (signal.SIGHUP, signal.SIGTERM)))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "cluster_of", started)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        plan = Launch(worker=("true",), folder=str(tmp_path))
        assert run.launch(plan, RunConsole(Console(file=io.StringIO()))) == run.INTERRUPTED
    finally:
        signal.signal(signal.SIGHUP, before)
    assert while_it_ran == [signal.SIG_IGN, lifeline._interrupt]


@pytest.mark.slow
def test_a_coordinator_that_cannot_be_started_for_a_moment_is_tried_again(
    tmp_path: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of this user are as many as it may have, say."""
    gate, refused = tmp_path / "gate", list[str]()
    gate.write_text("5")
    played, start = Played(tmp_path, GATED), LocalCluster.start

    def starts(cluster: LocalCluster, command: Command, output: Callable[[str], None]) -> Handle:
        if command.role == "coordinator" and (played.folder / "cluster.json").exists() and len(refused) < 2:
            refused.append(command.name)
            raise UsageError("coordinator cannot be started: python: Resource temporarily unavailable")
        return start(cluster, command, output)

    monkeypatch.setattr(LocalCluster, "start", starts)
    listens_again = lambda run: "coordinator" in run.handles and len(refused) == 2  # noqa: E731
    assert played.run(until(at_step(5), kills("coordinator"), listens_again, opens(gate, 99))) == 0, played.said
    assert played.said.count("coordinator could not be started: coordinator cannot be started: python: Resource") == 2
    assert (played.folder / "hash").read_text() == undisturbed


@pytest.mark.slow
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


@pytest.mark.slow
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

    def kept_as(run: ClusterRun) -> bool:  # for `rallypoint resume`
        kept = read_plan(played.folder)
        return (kept.workers, kept.workers_start, kept.servers) == ((1, 2), 2, 2)

    moves = [at_step(4), *ordered(2, 2), kept_as, opens(gate, 8), at_step(8), *ordered(1, 1), opens(gate, 99)]
    assert played.run(until(*moves)) == 0, played.said
    assert [answer.partition(": ")[2] for answer in answers] == ["2 workers and 2 servers", "1 worker and 1 server"]
    assert "going back" not in played.said
    assert (played.folder / "hash").read_text() == undisturbed
    kept = read_plan(played.folder)
    assert (kept.workers, kept.workers_start, kept.servers) == ((1, 1), 1, 1)


@pytest.mark.slow
def test_processes_listen_at_one_address_and_are_told_another(tmp_path: Path, undisturbed: str) -> None:
    gate = tmp_path / "gate"
    gate.write_text("5")
    played = Played(tmp_path, GATED, bind="127.0.0.1:0", advertise="localhost")
    told: list[str] = []

    def looks(run: ClusterRun) -> bool:
        (server,) = run.of_role("server")
        told.extend((read_where(played.folder).coordinator, " ".join(server.command.argv)))
        return True

    moves = (at_step(5), looks, kills("coordinator"), kills("worker0"), opens(gate, 99))
    assert played.run(until(*moves)) == 0, played.said
    assert told[0].startswith("localhost:")
    assert told[1].endswith("--bind 127.0.0.1:0 --advertise localhost")
    assert (played.folder / "hash").read_text() == undisturbed


def join_by_hand(played: Played) -> subprocess.Popen[str]:
    """Start the script as a user does who joins the running job."""
    where = read_where(played.folder)
    env = {**os.environ, "RALLYPOINT_COORDINATOR": where.coordinator, "RALLYPOINT_TOKEN": where.token,
           "RALLYPOINT_ID": "mine", "OMP_NUM_THREADS": "1"}  # fmt: skip
    argv = [sys.executable, str(played.script)]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def stands_by(run: ClusterRun) -> bool:
    return run.console.state.view is not None and "mine" in run.console.state.view.standby


@pytest.mark.slow
def test_a_worker_joined_by_hand_takes_part_and_ends_well(tmp_path: Path, undisturbed: str) -> None:
    gate = tmp_path / "gate"
    gate.write_text("5")
    played = Played(tmp_path, GATED, workers=2, workers_start=1)
    started: list[subprocess.Popen[str]] = []

    def by_hand(run: ClusterRun) -> bool:
        started.append(join_by_hand(played))
        return True

    def drop_one(run: ClusterRun) -> bool:  # so that `mine` computes
        run.supervisor.wanted["worker"] = 1
        run.handles["worker1"].signal(signal.SIGTERM)
        return True

    def computes(run: ClusterRun) -> bool:
        return run.console.state.view is not None and "mine" in run.console.state.view.workers

    moves = until(at_step(5), by_hand, stands_by, drop_one, computes, opens(gate, 99))
    assert played.run(moves) == 0, played.said
    output, _ = started[0].communicate(timeout=120)
    assert started[0].returncode == 0
    said = [line.partition(" joined")[0] for line in output.splitlines()]
    assert [line for line in said if line != f"weights sha256 {undisturbed}"] == ["mine has", "mine: the job is over"]
    assert (played.folder / "hash").read_text() == undisturbed


@pytest.mark.slow
def test_a_resumed_run_says_what_has_changed_and_runs_it_or_what_it_began_with(tmp_path: Path) -> None:
    (tmp_path / "gate").write_text("5")
    played = Played(tmp_path, GATED)
    assert played.run(until(at_step(5), raising(KeyboardInterrupt))) == run.INTERRUPTED
    assert f", the last snapshot: rallypoint resume {played.folder}" in played.said
    played.script.write_text("raise ValueError('edited')\n")
    (tmp_path / "gate").write_text("99")
    snapshot = sorted(path.name for path in (played.folder / "snapshots").iterdir() if path.is_dir())[0]
    played.plan = msgspec.structs.replace(played.plan, resume=snapshot)
    assert played.run(original=True) == 0, played.said
    assert "changed since the run began: script.py. The code runs as it was (--original)" in played.said
    assert "edited since" not in played.said
    assert played.run() == 1
    assert "changed since the run began: script.py. The code runs as it is now" in played.said
    assert "ValueError: edited" in played.said


@pytest.mark.slow
def test_a_script_that_fails_before_it_joins_ends_the_run_with_one_traceback(tmp_path: Path) -> None:
    played = Played(tmp_path, "import nowhere_to_be_found\n", workers=3, servers=2)
    assert played.run() == 1
    assert played.said.count("ModuleNotFoundError: No module named 'nowhere_to_be_found'") == 1
    assert "ended with the same error as worker" in played.said
    assert "ended with status 1" in played.said
    assert "waiting for" not in played.said


@pytest.mark.slow
def test_a_worker_that_ends_without_a_word_fails_the_run_after_a_last_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_run, "LAST_SNAPSHOT_S", 60.0)
    loss = "            micro.backward("
    quits = "            if micro.step == 20 and job.id == 'worker1':\n                os._exit(3)\n"
    played = Played(tmp_path, LONG_RUN.replace(loss, quits + loss), workers=2)
    assert played.run() == 1
    assert "failed: worker1 ended with status 3" in played.said
    (stored,) = re.findall(r"snapshot of step (\d+)", played.said)
    assert int(stored) >= 20
    assert f"to go on from step {stored}, the last snapshot: rallypoint resume {played.folder} (--set" in played.said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT, signal.SIGXCPU])
@pytest.mark.some("2")
def test_ctrl_c_and_a_notice_are_one_sentence(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, LONG_RUN) as (run, _):
        run.send_signal(number)
        assert run.wait(timeout=120) == 130
    said = (tmp_path / "output").read_text().partition("\nstep ")[2]
    rest = [line for line in said.splitlines()[1:] if not line.startswith("step ")]
    taken = rest[0].startswith("snapshot of step ")  # unless the machine is too busy for a quick one
    by = "" if number == signal.SIGINT else f" by {number.name}"
    assert rest[taken] == f"interrupted{by}: every process has been ended"
    version = rest[0].split()[3].removesuffix(":") if taken else "0"
    assert rest[taken + 1 :] == [
        f"to go on from step {version}, the last snapshot: rallypoint resume {tmp_path / 'run'}"
    ]
    assert any(folder.name.startswith(f"step-{int(version):08d}") for folder in (tmp_path / "run/snapshots").iterdir())
    journal = Journal(str(tmp_path / "run"))
    state = journal.load()
    journal.close()
    assert state.last_word is None, "that scripts were ended is no failure of the job"


def test_a_coordinator_that_is_started_by_hand_has_a_token_on_loopback_too(tmp_path: Path) -> None:
    """Another user of the machine could join and end the job. The token is in a file that only its owner reads."""
    env = {name: value for name, value in os.environ.items() if name != "RALLYPOINT_TOKEN"}
    argv = command("coordinator", "--terms", '{"workers_start": 1}')
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env) as coordinator:
        try:
            address = coordinator.stdout.readline().rpartition(" ")[2].strip()
            told = coordinator.stdout.readline()
            (file,) = tmp_path.glob("token-*")
            assert file.stat().st_mode & 0o777 == 0o600
            assert told.startswith("members need its token, which only you can read:  export RALLYPOINT_COORDINATOR=")
            assert file.name in told
            token = file.read_text()
            assert len(token) == 32
            assert token not in told
            transport = TcpTransport()
            for given, welcome in (("", False), ("guessed" * 4, False), (token, True)):
                connection = transport.connect(address, 10.0)
                hello = Hello("observer", "eyes", "here", to=COORDINATOR)
                with contextlib.nullcontext() if welcome else pytest.raises(UnprovenPeer, match="without proving"):
                    introduce(connection, hello, given)
                connection.close()
        finally:
            coordinator.send_signal(signal.SIGINT)
            coordinator.wait(30)
    assert not list(tmp_path.glob("token-*")), "it ends with its coordinator"


class _Hanging(Cluster):
    """A server that does not end, and the cluster that it is the only process of."""

    def __init__(self, name: str = "server0") -> None:
        self.command = Command(name=name, role="server", argv=())

    def exit(self) -> None:
        return None

    def signal(self, number: int) -> None:
        pass

    def start(self, command: Command, output: Callable[[str], None]) -> Handle:
        return self

    def end(self) -> None:
        pass


def test_who_does_not_end_after_the_job_is_waited_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store hangs: it is let say so itself before it is killed."""
    assert cluster_run._CLOSE_S > END_PATIENCE_S
    for name in ("_CLOSE_S", "_ERROR_S"):
        monkeypatch.setattr(cluster_run, name, 0.2)
    monkeypatch.setattr(cluster_run, "_SILENCE_S", 0.05)
    said = io.StringIO()
    with ClusterRun(
        Launch(worker=("true",), folder=str(tmp_path)), RunConsole(Console(file=said, width=1000)), _Hanging()
    ) as run:
        run.console.show(Members("1.1", workers=(), standby=(), servers=("server0",)))  # together with the job's end
        run.handles["server0"] = _Hanging()
        run.handles["server1"] = _Hanging("server1")  # it has never joined
        run._over = True
    assert said.getvalue() == "the job is over; waiting for server0 to close its files\n"


class _Worker(_Hanging):
    """A worker that has ended so, or does not end."""

    def __init__(self, name: str, ending: Exit | None = None) -> None:
        self.command, self._ending = Command(name=name, role="worker", argv=()), ending

    def exit(self) -> Exit | None:  # type: ignore[override]
        return self._ending


def over(tmp_path: Path, said: io.StringIO, workers: Sequence[_Worker], members: Sequence[str]) -> ClusterRun:
    """A run whose job is over. The `workers` took part; the `members` are in its last view."""
    console = RunConsole(Console(file=said, width=1000, highlight=False))
    run = ClusterRun(Launch(worker=("true",), folder=str(tmp_path)), console, _Hanging())
    for view in ([worker.command.name for worker in workers], members):
        run.console.show(Members("1.1", workers=tuple(view), standby=(), servers=()))
        cluster_run._note_members(run)
    run.handles |= {worker.command.name: worker for worker in workers}
    run._over = True
    return run


def test_a_worker_that_was_given_up_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """It is paused for good. Another one's script goes on for as long as it likes."""
    with over(tmp_path, io.StringIO(), [_Worker("worker0"), _Worker("worker1")], ["worker1"]) as run:
        left = run._worth_waiting_for(0.0), run._worth_waiting_for(cluster_run._LOST_S)
        assert [[handle.command.name for handle in waited] for waited in left] == [["worker0", "worker1"], ["worker1"]]
        run.handles.clear()


def test_a_worker_that_was_given_up_is_told_to_end_as_soon_as_the_job_is_over(tmp_path: Path) -> None:
    """It looked for a coordinator for a minute, and the launcher waited for it."""
    workers = [_Worker("worker0"), _Worker("worker1")]
    told = list[tuple[str, int]]()

    def ends(worker: _Worker, number: int) -> None:
        told.append((worker.command.name, number))
        worker._ending = Exit(0) if number == signal.SIGTERM else worker._ending

    for worker in workers:
        worker.signal = partial(ends, worker)  # type: ignore[method-assign]
    with over(tmp_path, io.StringIO(), workers, ["worker1"]) as run:

        def look(run: ClusterRun) -> None:
            workers[1]._ending = Exit(0)  # its script goes on for as long as it likes

        run._wait(look)
        assert told == [("worker0", signal.SIGCONT), ("worker0", signal.SIGTERM)]


@pytest.mark.parametrize(("number", "taken"), [(signal.SIGUSR1, True), (signal.SIGXCPU, True), (signal.SIGINT, False)])
def test_a_notice_that_is_repeated_does_not_end_the_wait_for_the_last_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, taken: bool
) -> None:
    """SIGXCPU comes each second, and some batch systems send their notice more than once."""
    plan = Launch(worker=("true",), folder=str(tmp_path), snapshots=str(tmp_path / "snapshots"))
    run, interrupts, sent = ClusterRun(plan, RunConsole(Console(file=io.StringIO())), _Hanging()), [number], list[Any]()
    looks = iter(range(3))

    def look() -> None:
        interrupts.append(number)
        if next(looks) == 2:
            run.console.finished = True  # (what ends the wait)

    monkeypatch.setattr(run, "_observer", SimpleNamespace(send=sent.append, close=lambda: None))
    monkeypatch.setattr(run, "_look", look)
    run.console.state.step = 7
    with run:
        cluster_run._take_last_snapshot(run, interrupts, 60.0)
    assert sent == [SnapshotWanted()]
    assert (next(looks, None) is None) == taken


def test_a_second_signal_while_a_run_ends_leaves_nobody_waiting_for_room_for_his_lines(tmp_path: Path) -> None:
    """The end of a cluster on Ray waits for the thread that passes the lines on."""
    run, put = over(tmp_path, io.StringIO(), [], []), threading.Event()
    run._over, run._lines = False, LineRelay(most=1)

    def interrupted(number: int) -> None:
        run._lines.put("worker0", "fills it")
        raise lifeline.Interrupted(signal.SIGTERM)

    hanging = _Hanging()
    hanging.signal = interrupted  # type: ignore[method-assign]
    with pytest.raises(lifeline.Interrupted), run:
        run.handles["server0"] = hanging
    threading.Thread(target=lambda: (run._lines.put("worker0", "more"), put.set()), daemon=True).start()
    assert put.wait(10)


@pytest.mark.parametrize(("given_up", "status"), [("worker0", 0), ("worker1", 1)])
def test_a_worker_that_was_given_up_and_finds_no_coordinator_any_more_does_not_fail_a_run_that_is_done(
    tmp_path: Path, given_up: str, status: int
) -> None:
    said = io.StringIO()
    workers = [_Worker("worker0", Exit(1)), _Worker("worker1", Exit(0))]
    with over(tmp_path, said, workers, sorted({"worker0", "worker1"} - {given_up})) as run:
        assert run._verdict() == status
    warned = "worker0, which was given up before the job's end, ended with status 1" in said.getvalue()
    assert warned == (status == 0)


@pytest.mark.slow
def test_the_last_snapshot_is_taken_when_nobody_reads_the_output_any_more(tmp_path: Path) -> None:
    played, screen = Played(tmp_path, LONG_RUN), Screen(file=io.StringIO())
    console = RunConsole(screen)
    done: list[int] = []

    def closes(run: ClusterRun) -> bool:
        done.append(run.console.state.step)
        screen.quiet = screen.closed = True  # as `Screen.on_broken_pipe` does
        return True

    assert run.launch(played.plan, console, until(at_step(5), closes)) == run.CLOSED
    assert console.steps_stored >= done[0] >= 5


@pytest.mark.slow
def test_why_a_job_failed_is_told_also_by_a_launcher_that_was_not_connected_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the members may be faster than the launcher's own link."""
    monkeypatch.setattr(ClusterRun, "_observe", lambda run: None)
    played = Played(tmp_path, script("9, seed=int(job.id[-1])"), workers=2)
    assert played.run() == 1
    assert "brought different settings: seed is " in played.said


@pytest.mark.slow
def test_nobody_reading_the_output_ends_the_run_quietly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LONG_RUN)
    argv = command("run", "--workers", "1", "--servers", "1", "--folder", str(tmp_path / "run"), str(script))
    run = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(timeout=120) == 141
    assert run.stderr.read() == b""
    run.stderr.close()


def test_a_run_in_another_thread_heeds_no_signals() -> None:
    """A notebook's or a server's thread may run `RallypointTrainer.fit`; Python gives signals to the main thread."""
    came: list[list[int]] = []

    def run() -> None:
        with lifeline.raised(), lifeline.noted() as noted:
            came.append(noted)

    (thread := threading.Thread(target=run)).start()
    thread.join()
    assert came == [[]]


CHATTY = """
import pathlib, time
for _ in range(1000):
    print("x" * 1000, flush=True)  # much more than a pipe takes
pathlib.Path(BEGAN).touch()
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_run_whose_output_is_not_read_and_not_closed_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """As of a pager that nobody scrolls, or a terminal that was stopped."""
    script = tmp_path / "script.py"
    script.write_text(CHATTY.replace("BEGAN", repr(str(tmp_path / "began"))))
    argv = command("run", "--workers", "1", "--servers", "1", "--folder", str(tmp_path / "run"), str(script))
    run = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until_true((tmp_path / "began").exists)
        run.terminate()
        assert run.wait(timeout=120) == 130
    finally:
        run.kill()
        run.communicate()


def _breaks_the_store(run: ClusterRun) -> bool:
    """No snapshot can be written any more, as on a disk that is full or gone."""
    store = Path(run.plan.snapshots)
    store.rename(store.with_name("away"))
    store.write_text("")
    return True


def _mends_the_store(run: ClusterRun) -> bool:
    store = Path(run.plan.snapshots)
    store.unlink()
    store.with_name("away").rename(store)
    return True


@pytest.mark.parametrize("way", ["room", "ctrl-c"])
@pytest.mark.slow
def test_a_last_version_that_cannot_be_stored_is_held_until_there_is_room_or_the_user_lets_go(
    tmp_path: Path, way: str
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("5")
    played = Played(tmp_path, GATED, heartbeat=2.0)
    presses: list[int] = [signal.SIGINT]
    ends = _mends_the_store if way == "room" else lambda run: run._release(presses)
    moves = until(at_step(5), _breaks_the_store, opens(gate, 99), lambda run: run.console.holding, ends)
    assert played.run(moves) == 0, played.said
    assert "version 12, the last, is not stored (" in played.said
    assert "server0 hold it in memory and wait: make room, it is tried again" in played.said
    assert played.said.count("the last, is not stored") == 1
    stored = list(tmp_path.glob("run/snapshots/step-00000012-*/manifest.json"))
    assert len(stored) == (way == "room")
    assert ("ending without the last version stored" in played.said) == (way == "ctrl-c")
    assert presses == ([signal.SIGINT] if way == "room" else []), "the press is used up: again Ctrl-C ends the scripts"
    said = played.said.splitlines()
    assert said[0] == f"the run's folder: {played.folder}"
    assert said[1] == "starting 1 server and 1 worker: each imports torch first"
    assert said[-1] == f"everything of this run: {played.folder} (its curves: rallypoint watch {played.folder})"
    assert said[-2].startswith("done: 12 steps, ")


@pytest.mark.slow
def test_while_the_last_version_is_held_a_coordinator_that_dies_is_replaced_though_a_worker_has_failed(
    tmp_path: Path,
) -> None:
    """Without it nobody could store what the servers hold."""
    gate = tmp_path / "gate"
    gate.write_text("5")
    fails = "import os, signal\nsignal.signal(signal.SIGUSR1, lambda number, frame: os._exit(1))\n"
    played = Played(tmp_path, fails + GATED, workers=2, heartbeat=2.0)

    def fail(run: ClusterRun) -> bool:
        run.handles["worker1"].signal(signal.SIGUSR1)
        return True

    holds = lambda run: run.console.holding  # noqa: E731
    moves = until(
        at_step(5), _breaks_the_store, opens(gate, 99), holds, fail, lambda run: "worker1" not in run.handles,
        kills("coordinator"), lambda run: not holds(run), holds, _mends_the_store,
    )  # fmt: skip
    assert played.run(moves) == 0, played.said
    assert played.said.count("coordinator was killed (SIGKILL): starting another") == 1
    assert len(list(tmp_path.glob("run/snapshots/step-00000012-*/manifest.json"))) == 1


FAILING_STANDBY = """
import os, pathlib, signal, sys, time, torch, rallypoint as rp
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
begun, failed = (pathlib.Path(sys.argv[1], name) for name in ("begun", "failed"))
stands_by = os.environ["RALLYPOINT_ID"] == "worker2"
while stands_by and not begun.exists():
    time.sleep(0.01)

def fail(*_):
    failed.with_suffix(".new").write_text(str(os.getpid()))
    failed.with_suffix(".new").rename(failed)
    raise RuntimeError("only I fail")

def is_gone():  # the launcher has noticed its end
    try:
        os.kill(int(failed.read_text()), 0)
    except ProcessLookupError:
        return True

with rp.join() as job:
    if stands_by:
        signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, 1.0)  # while it joins, or stands by: it is to make no difference
    for micro in job.train(model, data, replicas=2, batch=4, steps=40):
        with micro:
            begun.touch()
            while micro.step == 20 and not (failed.exists() and is_gone()):
                time.sleep(0.01)
            micro.backward(model(micro.batch[0]).square().mean())
"""


@pytest.mark.slow
def test_a_worker_that_stands_by_fails_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING_STANDBY)
    options = ("--workers", "2", "--standby", "1", "--folder", str(tmp_path / "run"))
    argv = ["-m", "rallypoint.cli", "run", *options, str(script), str(tmp_path)]
    status, said = run_program(argv, tmp_path / "output", env=os.environ, timeout=240)
    assert status == 0, said
    assert "worker2 is gone: it has failed: RuntimeError: only I fail" in said
    assert "worker2 ended with status 1 before it took part; the job goes on without it" in said
    assert "done: 40 steps" in said
