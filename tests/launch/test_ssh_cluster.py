"""Processes over a real ssh on this machine pass the contract of a cluster, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from sshd import Shell, shell

from rallypoint.errors import UsageError
from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.remote import RemoteProcess, SshCluster
from rallypoint.launch.plan import Host, Launch, hosts_in
from support import cluster_contract
from support.beside import until
from support.cluster_contract import PATIENCE_S, ClusterContract, Started


@pytest.fixture(scope="module")
def shells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with shell(tmp_path_factory.mktemp("ssh")) as opened:
        yield opened


@pytest.fixture(scope="module")
def host(shells: Shell) -> Host:
    return hosts_in(shells.line(shells.serve()), "the test")[0]


@pytest.fixture
def plan(shells: Shell, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setenv("PATH", shells.path)
    return Launch(worker=(), engine="ssh", hosts=(host,), folder=str(tmp_path / "run"))


@pytest.mark.slow
class TestSshCluster(ClusterContract):
    @pytest.fixture
    def cluster(self, plan: Launch) -> Iterator[SshCluster]:
        with SshCluster(plan, [].append) as cluster:
            yield cluster

    def test_what_a_killed_worker_had_started_does_not_outlive_it(self, running: SshCluster) -> None:
        worker = Started(running, "import os; print(os.getpid(), flush=True); " + cluster_contract._PARENT)
        parent, left = psutil.Process(int(worker.line())), psutil.Process(int(worker.line()))
        parent.kill()
        assert worker.exit().signal == "SIGKILL"
        assert psutil.wait_procs([left], timeout=PATIENCE_S)[1] == []

    def test_a_lost_connection_is_the_death_of_its_processes_and_the_next_one_gets_another(
        self, running: SshCluster
    ) -> None:
        workers = [Started(running, _WHO, name=f"worker{n}") for n in range(2)]
        pids = [psutil.Process(int(worker.line())) for worker in workers]
        _client(workers[0]).kill()
        for worker in workers:
            how = worker.exit()
            assert (how.died, how.signal) == (True, "SIGHUP")
            assert "@127.0.0.1: the connection ended" in how.reason
        assert psutil.wait_procs(pids, timeout=PATIENCE_S)[1] == []
        again = Started(running, "print('again')", name="worker2")
        assert again.exit().status == 0
        assert again.lines() == ["again"]

    def test_no_secret_is_on_a_command_line(self, running: SshCluster) -> None:
        worker = Started(running, "import os; print(os.environ['RALLYPOINT_TOKEN'], flush=True); " + _WHO, **SECRET)
        assert worker.line() == SECRET["RALLYPOINT_TOKEN"]
        everybody = [psutil.Process(int(worker.line())), *psutil.Process(_client(worker).pid).children(recursive=True)]
        for process in (_client(worker), *everybody):
            assert SECRET["RALLYPOINT_TOKEN"] not in " ".join(process.cmdline())

    def test_what_a_process_starts_in_is_where_the_launcher_is(self, running: SshCluster) -> None:
        where = Started(running, "import os; print(os.getcwd())")
        where.exit()
        assert where.lines() == [os.getcwd()]


SECRET = {"RALLYPOINT_TOKEN": "0123456789abcdef-secret"}
_WHO = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


def _client(started: Started) -> psutil.Process:
    assert isinstance(started.handle, RemoteProcess)
    client = started.handle.link._client
    return psutil.Process(client.pid)


def test_a_host_that_does_not_answer_is_left_out_with_a_sentence(plan: Launch, shells: Shell, host: Host) -> None:
    gone = Host(host.name, 1, python=shells.python)
    said: list[str] = []
    with SshCluster(_with_hosts(plan, host, gone), said.append) as cluster:
        worker = Started(cluster, "print('here')", name="worker0")
        assert worker.exit().status == 0
        assert isinstance(worker.handle, RemoteProcess)
        assert worker.handle.host == host
    (sentence,) = said
    assert "is left out" in sentence
    assert "Connection refused" in sentence


def test_a_connection_is_the_runs_own_and_leaves_no_master_behind(
    plan: Launch, shells: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' connections (ControlMaster in the user's configuration) have other signs of life, and outlive the run."""
    config = shells.folder / "shared-config"
    master = tmp_path / "master"
    ours = (shells.folder / "config").read_text()
    config.write_text(f"ControlMaster auto\nControlPath {master}\nControlPersist 30\n{ours}")
    monkeypatch.setenv("PATH", shells.client(config))
    with SshCluster(plan, pytest.fail) as cluster:
        assert Started(cluster, "print('here')", name="worker0").exit().status == 0
        assert not master.exists()


@pytest.mark.slow
def test_without_the_coordinators_host_nothing_begins(plan: Launch, shells: Shell, host: Host) -> None:
    gone = Host(host.name, 1, python=shells.python)
    with (
        pytest.raises(UsageError, match=r"where the coordinator is to run, cannot be used: .*Connection refused"),
        SshCluster(_with_hosts(plan, gone, host), pytest.fail),
    ):
        pass


@pytest.mark.slow
def test_a_python_that_is_not_there_is_named_with_what_to_write(plan: Launch, host: Host) -> None:
    wrong = Host(host.name, host.port, python="/no/such/python")
    with (
        pytest.raises(UsageError, match=r"/no/such/python.* \(write python=PATH after the host"),
        SshCluster(_with_hosts(plan, wrong), pytest.fail),
    ):
        pass


LAUNCHER = """
import signal, sys, msgspec
from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.remote import SshCluster
from rallypoint.launch.plan import Launch
with SshCluster(msgspec.json.decode(sys.argv[1], type=Launch), print) as cluster:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    command = Command(name="a", role="worker", argv=(sys.executable, "-c", code))
    cluster.start(command, lambda line: print(line, flush=True))
    signal.pause()
"""


@pytest.mark.slow
def test_no_process_outlives_a_launcher_that_was_killed(plan: Launch) -> None:
    argv = [sys.executable, "-c", LAUNCHER, msgspec.json.encode(plan).decode()]
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    remote = psutil.Process(int(launcher.stdout.readline()))
    clients = psutil.Process(launcher.pid).children()
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    assert psutil.wait_procs([remote, *clients], timeout=PATIENCE_S)[1] == []


@pytest.mark.slow
def test_a_host_that_does_not_see_the_runs_folder_gets_the_code(plan: Launch, shells: Shell, host: Host) -> None:
    """Its Python runs where the folder is an empty file system of its own."""
    folder = Path(plan.folder)
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "train.py").write_text("print('copied')")
    far = Host(host.name, host.port, python=_elsewhere(shells, folder))
    with SshCluster(_with_hosts(plan, far, script="train.py", snapshots=""), pytest.fail) as cluster:
        command = Command(name="worker0", role="worker", argv=(sys.executable, str(folder / "code" / "train.py")))
        lines: list[str] = []
        handle = cluster.start(command, lines.append)
        until(lambda: handle.exit() is not None)
        assert lines == ["copied"]
    assert not list(folder.glob(".seen-*"))


@pytest.mark.slow
def test_snapshots_that_a_host_would_not_see_are_refused(plan: Launch, shells: Shell, host: Host) -> None:
    folder = Path(plan.folder)
    folder.mkdir()
    far = Host(host.name, host.port, python=_elsewhere(shells, folder))
    there = str(folder / "snapshots")
    with (
        pytest.raises(UsageError, match=r"does not see .*snapshots, where the snapshots would be: give --snapshots a"),
        SshCluster(_with_hosts(plan, far, snapshots=there), pytest.fail),
    ):
        pass


def _with_hosts(plan: Launch, *hosts: Host, **changes: str) -> Launch:
    return msgspec.structs.replace(plan, hosts=hosts, **changes)


def _elsewhere(shells: Shell, folder: Path) -> str:
    """A Python that sees an empty folder in its place."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs a mount namespace (root)")
    inside = shells.folder / "inside"
    inside.write_text(f'#!/bin/sh\nmount -t tmpfs none "{folder}" && exec "$@"\n')
    inside.chmod(0o755)
    return shells.program("elsewhere", f'exec unshare -m "{inside}"')
