"""Processes on this machine pass the contract of a cluster, and leave nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from rallypoint.errors import UsageError
from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.local import LocalCluster
from support import cluster_contract
from support.cluster_contract import PATIENCE_S, ClusterContract, Started


class TestLocalCluster(ClusterContract):
    @pytest.fixture
    def cluster(self) -> LocalCluster:
        return LocalCluster()

    def test_what_a_killed_worker_had_started_does_not_outlive_it(self, running: LocalCluster) -> None:
        worker = Started(running, cluster_contract._PARENT)
        left = psutil.Process(int(worker.line()))
        psutil.Process(worker.handle.process.pid).kill()  # type: ignore[attr-defined]
        assert worker.exit().died
        assert psutil.wait_procs([left], timeout=PATIENCE_S)[1] == []

    def test_the_end_of_a_cluster_is_the_end_of_what_its_workers_started(self, running: LocalCluster) -> None:
        worker = Started(running, cluster_contract._PARENT)
        left = psutil.Process(int(worker.line()))
        running.end()
        assert psutil.wait_procs([left], timeout=PATIENCE_S)[1] == []

    def test_a_program_that_is_not_there_is_a_sentence(self, running: LocalCluster) -> None:
        with pytest.raises(UsageError, match="worker0 cannot be started: /no/such/program: No such file or directory"):
            running.start(Command(name="worker0", role="worker", argv=("/no/such/program",)), lambda line: None)


CHILD_OF_A_LAUNCHER = """
import os, signal, sys
from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.local import LocalCluster
cluster = LocalCluster()
code = "from rallypoint.launch.lifeline import hold_lifeline; import os, time; hold_lifeline(); print(os.getpid(), "
code += "flush=True); time.sleep(1000)"
cluster.start(Command(name="a", role="worker", argv=(sys.executable, "-c", code)), lambda line: print(line, flush=True))
signal.pause()
"""


def test_no_process_outlives_a_launcher_that_was_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", CHILD_OF_A_LAUNCHER], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(launcher.stdout.readline()))
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    assert psutil.wait_procs([child], timeout=PATIENCE_S)[1] == []


WITHOUT_A_LIFELINE = """
import os, signal, sys
from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.local import LocalCluster
cluster = LocalCluster()
for name in ("a", "b"):
    command = Command(name=name, role="worker", argv=(sys.executable, "-c", _PARENT))
    cluster.start(command, lambda line: sys.stdout.write(line + "\\n"))
print(*(process.process.pid for process in cluster._started), flush=True)
signal.pause()
""".replace("_PARENT", repr(cluster_contract._PARENT))


@pytest.mark.slow
def test_what_a_worker_started_before_it_joined_does_not_outlive_a_launcher_that_was_killed() -> None:
    """A script that still loads its data holds no lifeline, and no child of a script does."""
    argv = [sys.executable, "-u", "-c", WITHOUT_A_LIFELINE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
        pids = [int(word) for _ in range(3) for word in launcher.stdout.readline().split()]
        processes = [psutil.Process(pid) for pid in pids]
        launcher.kill()
    assert len(processes) == 4
    try:
        assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
    finally:
        for process in processes:
            if process.is_running():
                process.kill()
