"""A process that the kernel has killed for lack of memory is told so, and one that somebody has killed is not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.local import LocalCluster, MemoryKills, counter_file

KILLED_BY_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
WAITS = "import signal; signal.pause()"


def ended(cluster: LocalCluster, script: str, *, by: int = 0) -> str:
    process = cluster.start(Command(name="worker0", role="worker", argv=(sys.executable, "-c", script)), print)
    if by:
        process.signal(by)
    return str(process.wait())


@pytest.fixture
def events(tmp_path: Path) -> Path:
    (tmp_path / "memory.events").write_text("low 0\nhigh 3\nmax 0\noom 2\noom_kill 2\n")
    return tmp_path / "memory.events"


def test_a_process_that_was_killed_while_the_kernel_s_count_rose_probably_lacked_memory(events: Path) -> None:
    with LocalCluster() as cluster:
        cluster._memory = MemoryKills(events)
        assert ended(cluster, KILLED_BY_ITSELF) == "was killed (SIGKILL)"
        events.write_text("oom 3\noom_kill 3\n")
        told = ended(cluster, KILLED_BY_ITSELF)
        assert told.startswith("was killed (SIGKILL): probably for lack of memory")
        assert "use fewer processes, a smaller batch" in told
        assert ended(cluster, KILLED_BY_ITSELF) == "was killed (SIGKILL)", "one kill explains one death"


def test_a_process_that_the_launcher_kills_or_that_ends_otherwise_did_not_lack_memory(events: Path) -> None:
    with LocalCluster() as cluster:
        cluster._memory = MemoryKills(events)
        events.write_text("oom_kill 9\n")
        assert ended(cluster, WAITS, by=signal.SIGKILL) == "was killed (SIGKILL)"
        assert ended(cluster, WAITS, by=signal.SIGTERM) == "was killed (SIGTERM)"
        assert ended(cluster, "raise SystemExit(3)") == "ended with status 3"


def test_the_nearest_counter_is_that_of_the_own_cgroup(tmp_path: Path) -> None:
    root, own, system = tmp_path / "cgroup", tmp_path / "self", tmp_path / "vmstat"
    assert counter_file(root, own, system) is None
    system.write_text("nr_free_pages 1\noom_kill 4\n")
    assert counter_file(root, own, system) == system
    own.write_text("9:cpu,memory:/box\n0::/slice/run\n")
    for folder, name in (("memory", "memory.oom_control"), ("memory/box", "memory.oom_control")):
        (root / folder).mkdir(parents=True)
        (root / folder / name).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
        assert counter_file(root, own, system) == root / folder / name
    (root / "slice/run").mkdir(parents=True)
    (root / "slice/run/memory.events").write_text("oom_kill 0\n")
    assert counter_file(root, own, system) == root / "slice/run/memory.events"
    assert MemoryKills(tmp_path / "none").one_more() is False
    assert os.path.exists("/proc/vmstat") <= (counter_file() is not None)
