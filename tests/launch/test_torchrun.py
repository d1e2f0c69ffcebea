"""A script that calls `rallypoint.join` under ``torchrun``: one cluster, with deaths that no agent answers by a restart
of everybody."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from gated import AT, ENV, PATIENCE_S, SCRIPT, alone, hash_of, named, steps_done, wait_until
from sshd import kill_all

from rallypoint.errors import UsageError
from rallypoint.launch.engines.discovery import Place, check_token

pytestmark = [pytest.mark.slow, pytest.mark.programs, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return alone(tmp_path_factory.mktemp("alone"))


LATE = """
import os, pathlib, sys, time
while "+" in os.environ.get("RALLYPOINT_ID", "") and not pathlib.Path(sys.argv[1]).with_name("over").exists():
    time.sleep(0.01)
"""  # a process that is started again begins when the job is over


class Agents:
    """Agents of torchrun on this machine, with two processes each. The first has torchrun's store and rank 0."""

    def __init__(self, folder: Path, count: int, script: str) -> None:
        self.folder, self.gate = folder, folder / "gate"
        (folder / "train.py").write_text(script)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        argv = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job", "train.py"),
        ]
        options = {"TMPDIR": str(folder)}  # where a killed rank 0 leaves the file of its token
        options["RALLYPOINT_OPTIONS"] = f"--replication {count} --snapshot-steps 4 --folder {folder / 'run'}"
        self.agents = []
        for number in range(count):
            with (folder / f"output{number}").open("w") as output:
                self.agents.append(subprocess.Popen(
                    [*argv, str(self.gate)], cwd=folder, env={**ENV, **options}, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                ))  # fmt: skip
            wait_until(lambda: _listens(port), lambda: True, self.said)

    def said(self) -> str:
        return "".join((self.folder / f"output{number}").read_text() for number in range(len(self.agents)))

    def until_step(self, step: int) -> None:
        running = lambda: any(agent.poll() is None for agent in self.agents)  # noqa: E731
        wait_until(lambda: steps_done(self.folder / "run") >= step, running, self.said)

    def ended(self) -> str:
        """Let the job end, and return its hash."""
        self.gate.touch()
        wait_until(lambda: "done: " in self.said() and "sha256" in self.said(), lambda: True, self.said)
        return hash_of(self.said())


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def agents(folder: Path, count: int = 2, script: str = SCRIPT) -> Iterator[Agents]:
    started = Agents(folder, count, script)
    everybody: list[psutil.Process] = []
    try:
        yield started
    finally:
        for agent in started.agents:
            if agent.poll() is None:
                everybody += psutil.Process(agent.pid).children(recursive=True)
            agent.kill()
            agent.wait()
        kill_all(everybody)


def test_a_worker_that_dies_is_no_matter_for_the_agents(tmp_path: Path, undisturbed: str) -> None:
    with agents(tmp_path) as started:
        started.until_step(AT - 1)
        both = {name: process for agent in started.agents for name, process in named(psutil.Process(agent.pid)).items()}
        assert sorted(both) == ["coordinator", "server-0", "server-2", "worker0", "worker1", "worker2", "worker3"]
        supervisors = {process.ppid() for process in both.values()}
        for name in ("worker1", "worker2", "server-2", "coordinator"):
            both[name].kill()
        assert started.ended() == undisturbed
        assert [agent.wait(PATIENCE_S) for agent in started.agents] == [0, 0], started.said()
        assert len(supervisors) == 4
        for name in ("worker1", "worker2", "server-2", "coordinator"):
            assert f"{name} was killed (SIGKILL): starting another" in started.said()


@pytest.mark.parametrize("worker", ["worker0", "worker1"])
def test_a_worker_that_is_back_only_when_the_job_is_over_has_not_failed(
    tmp_path: Path, undisturbed: str, worker: str
) -> None:
    with agents(tmp_path, count=1, script=LATE + SCRIPT) as started:
        started.until_step(AT - 1)
        named(psutil.Process(started.agents[0].pid))[worker].kill()
        assert started.ended() == undisturbed
        (tmp_path / "over").touch()
        assert started.agents[0].wait(PATIENCE_S) == 0, started.said()


@pytest.mark.parametrize("children", ["killed", "left"])
def test_an_agent_that_is_killed_costs_no_byte(tmp_path: Path, undisturbed: str, children: str) -> None:
    with agents(tmp_path) as started:
        started.until_step(AT - 1)
        _, victim = started.agents
        below = psutil.Process(victim.pid).children(recursive=True)
        victim.send_signal(signal.SIGKILL)
        if children == "killed":
            kill_all(below)
        assert started.ended() == undisturbed
        assert psutil.wait_procs(below, timeout=PATIENCE_S)[1] == []
        assert "starting another" not in started.said()


def test_after_the_loss_of_everything_the_same_command_goes_on_from_the_last_snapshot(
    tmp_path: Path, undisturbed: str
) -> None:
    with agents(tmp_path) as started:
        started.until_step(AT - 1)
        snapshots = tmp_path / "run" / "snapshots"
        running = lambda: started.agents[0].poll() is None  # noqa: E731
        wait_until(lambda: any(snapshots.glob("*/*.json")), running, started.said)
        first, second = started.agents
        below = psutil.Process(first.pid).children(recursive=True)
        assert "coordinator" in named(psutil.Process(first.pid))
        first.kill()
        kill_all(below)
        assert second.wait(PATIENCE_S) != 0  # torchrun's own store was there
    with agents(tmp_path) as again:
        assert again.ended() == undisturbed
        assert "going on from snapshot step-" in again.said()


@pytest.mark.parametrize("env", [{}, {"RALLYPOINT_TOKEN": "it"}])
def test_several_machines_need_a_token_from_the_user(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    place = Place(launcher="torchrun", rank=1, world=2, local_rank=0, nodes=2, attempt="x", master="node1:29500")
    if env:
        check_token(place)
        return
    with pytest.raises(UsageError, match="torchrun on several machines: give every process the job's token"):
        check_token(place)
