"""Processes on Ray pass the contract of a cluster; what is said of those that wait for room, and of nodes that go."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_nodes import no_leaks

from rallypoint.errors import UsageError
from rallypoint.launch import runner
from rallypoint.launch.engines import guard
from rallypoint.launch.engines.cluster import Command, Exit
from rallypoint.launch.engines.far_end import unpacked
from rallypoint.launch.engines.ray import Driver, NodeProcess, argv_here
from rallypoint.launch.engines.remote import archived
from rallypoint.launch.options import RunOptions
from rallypoint.launch.plan import HERE
from support import cluster_contract
from support.beside import until
from support.cluster_contract import PATIENCE_S, ClusterContract, Started

DRIVER = Driver(node="head", python="/their/python", runner="/their/runner.py", cwd="/nowhere", code="/run/code")

pytestmark = pytest.mark.slow  # Ray takes seconds to start


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Before the leak police looks: Ray leaves a variable in the environment."""
    with contextlib.suppress(ImportError):
        import ray  # noqa: F401


def test_a_command_is_run_with_what_its_node_has() -> None:
    argv = ("/their/python", "/their/runner.py", "/run/code", "train.py", HERE)
    worker = Command(name="worker0", role="worker", argv=argv)
    ours = runner.__file__
    assert argv_here(worker, DRIVER, address="10.0.0.7", code="/tmp/x") == (
        sys.executable, ours, "/tmp/x", "train.py", HERE,
    )  # fmt: skip
    server = Command(name="server0", role="server", argv=("/their/python", "-m", "x", "--bind", f"{HERE}:0"))
    assert argv_here(server, DRIVER, address="10.0.0.7", code="")[-1] == "10.0.0.7:0"


def test_code_comes_to_a_node_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "code" / "package").mkdir(parents=True)
    (tmp_path / "code" / "train.py").write_text("1")
    (tmp_path / "code" / "package" / "model.py").write_text("2")
    there = tmp_path / "there"
    assert unpacked(archived(tmp_path), there) == ""
    assert [(there / "code" / name).read_text() for name in ("train.py", "package/model.py")] == ["1", "2"]
    guard.watch(iter(()), [str(there)])  # type: ignore[arg-type]
    assert not there.exists()


def test_on_machines_of_an_engine_each_listens_at_its_own_address() -> None:
    assert RunOptions(engine="ray").run(["x"]).bind == f"{HERE}:0"
    assert RunOptions(engine="ray", bind="0.0.0.0:0", advertise="10.0.0.7").run(["x"]).bind == "0.0.0.0:0"
    for given in (RunOptions(gpus=1.0), RunOptions(address="auto")):
        with pytest.raises(UsageError, match="is for --engine ray"):
            given.run(["x"])


def test_a_server_on_a_node_that_does_not_see_the_snapshots_is_refused_with_a_sentence(tmp_path: Path) -> None:
    driver = Driver(node="head", python="", runner="", cwd="/nowhere", marker=str(tmp_path / "snapshots" / ".seen"))
    actor = NodeProcess("other", "10.0.0.8")
    assert actor.start(Command(name="server0", role="server", argv=("true",)), driver).pid == 0
    news = actor.more(0)
    assert news.lines[0].startswith(f"error: the node 10.0.0.8 does not see {tmp_path}/snapshots, where")
    assert news.exit == Exit(127, started=False)


SUPERVISED = """
import os, sys
from rallypoint.launch.engines.cluster import Command
from rallypoint.launch.engines.ray import Driver, NodeProcess
code = "import subprocess, sys, time; argv = [sys.executable, '-c', 'import time; time.sleep(1000)']; "
code += "print(subprocess.Popen(argv).pid, __import__('os').getpid(), flush=True); time.sleep(1000)"
actor = NodeProcess("node")
driver = Driver(node="head", python=sys.executable, runner="", cwd="/nowhere")
actor.start(Command(name="worker0", role="worker", argv=(sys.executable, "-c", code)), driver)
print(actor.more(0).lines[0], flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_and_its_children_end_with_their_actor() -> None:
    """Though they hold no lifeline: the guard ends them."""
    said = subprocess.run([sys.executable, "-c", SUPERVISED], capture_output=True, text=True, timeout=PATIENCE_S)
    gone = [psutil.Process(int(pid)) for pid in said.stdout.split() if psutil.pid_exists(int(pid))]
    assert len(said.stdout.split()) == 2, said.stderr
    assert psutil.wait_procs(gone, timeout=PATIENCE_S)[1] == []


def test_lines_come_once_and_the_exit_after_them() -> None:
    actor = NodeProcess("head")
    code = "for n in range(2500): print(n)"
    actor.start(Command(name="worker0", role="worker", argv=(sys.executable, "-c", code)), DRIVER)
    lines: list[str] = []
    while (news := actor.more(len(lines))).exit is None:
        assert news.first == len(lines)
        lines += news.lines
    assert [*lines, *news.lines] == [str(n) for n in range(2500)]
    assert actor.more(2500).exit == Exit(0)


@pytest.mark.parametrize(("address", "words"), [
    ("foo", "write host:port"), ("ray://127.0.0.1:10001", "`ray job submit`"),
    ("127.0.0.1:1", "there is no Ray cluster at 127.0.0.1:1: .*refused"),
])  # fmt: skip
def test_an_address_without_a_cluster_is_a_sentence_at_once(address: str, words: str) -> None:
    pytest.importorskip("ray")
    from rallypoint.launch.engines.ray import RayCluster

    with pytest.raises(UsageError, match=words):
        RayCluster(address)


def test_an_actor_that_cannot_run_says_why_and_is_no_death() -> None:
    """The next one could not either: a node without rallypoint, say."""
    errors = pytest.importorskip("ray.exceptions")
    from rallypoint.launch.engines.ray import RayProcess, _how

    process = RayProcess(Command(name="worker0", role="worker", argv=("x",)), lambda line: None)
    trace = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'rallypoint'\n"
    failed = errors.RayTaskError("start", trace, ImportError("x"), "ray", 1, "10.0.0.7")
    for error in (failed, errors.ActorDiedError(failed)):
        how = _how(process, error)
        assert not how.died
        assert "its Ray actor cannot run: ModuleNotFoundError: No module named 'rallypoint'" in str(how)


def test_a_process_that_is_started_while_others_are_forgotten_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rallypoint.launch.engines.ray import RayCluster, RayProcess

    cluster = RayCluster.__new__(RayCluster)
    cluster._lock, cluster._ended, cluster._looked = threading.Lock(), False, -math.inf
    for asks_ray in ("_place", "_drain", "_servers_first", "_name_those_that_wait"):
        monkeypatch.setattr(cluster, asks_ray, lambda *process: None)
    second = Command(name="worker1", role="worker", argv=("x",))
    starting = threading.Thread(target=lambda: cluster.start(second, lambda line: None))

    class Slow(RayProcess):
        def exit(self) -> Exit | None:
            if starting.ident is None:
                starting.start()
                starting.join(0.2)  # without a lock it would be done by now
            return None

    cluster._processes = [Slow(Command(name="worker0", role="worker", argv=("x",)), lambda line: None)]
    cluster._look()
    starting.join()
    assert [process.command.name for process in cluster._processes] == ["worker0", "worker1"]


def test_what_goes_wrong_with_ray_is_said_once_and_the_looking_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rallypoint.launch.engines import ray as engine

    cluster = engine.RayCluster.__new__(engine.RayCluster)
    said: list[str] = []
    cluster._ended, cluster._said, cluster._say, looks = False, "", said.append, iter(range(3))

    def look() -> None:
        if next(looks, None) is None:
            cluster._ended = True
            return
        raise ConnectionError("no GCS\nat all")

    monkeypatch.setattr(engine, "_AGAIN_S", 0.0)
    monkeypatch.setattr(cluster, "_look", look)
    cluster._look_after()
    assert said == ["Ray does not answer: no GCS"]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One Ray for the tests of this module."""
    pytest.importorskip("ray")
    from ray_nodes import ray_nodes

    with ray_nodes(8):
        import ray

        yield ray


class TestRayCluster(ClusterContract):
    @pytest.fixture(autouse=True)
    def _leak_police(self, ray: Any) -> Iterator[None]:
        """Instead of that of all tests."""
        yield from no_leaks()

    @pytest.fixture
    def cluster(self, ray: Any) -> Any:
        from rallypoint.launch.engines.ray import RayCluster

        return RayCluster()

    def test_what_a_killed_worker_had_started_does_not_outlive_it(self, running: Any) -> None:
        worker = Started(running, cluster_contract._PARENT)
        left = psutil.Process(int(worker.line()))
        left.parent().kill()  # type: ignore[union-attr]
        assert worker.exit().died
        assert psutil.wait_procs([left], timeout=PATIENCE_S)[1] == []

    def test_a_lost_actor_is_a_death_and_its_process_ends(self, running: Any) -> None:
        worker = Started(running, cluster_contract._PARENT)
        left = psutil.Process(int(worker.line()))
        process = left.parent()
        process.parent().kill()  # type: ignore[union-attr]
        assert (how := worker.exit()).died
        assert "Ray actor is gone" in str(how)
        assert psutil.wait_procs([left, process], timeout=PATIENCE_S)[1] == []

    def test_what_does_not_fit_waits_with_a_sentence_and_is_no_death(
        self, running: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from rallypoint.launch.engines import ray as engine

        monkeypatch.setattr(engine, "_WAITS_S", 0.0)
        running._needs["worker"], running._say = (100.0, 0.0), (said := queue.SimpleQueue[str]()).put
        large = Started(running, "pass")
        assert said.get(timeout=PATIENCE_S) == "worker0 waits for room in the Ray cluster (100 CPU)"
        assert large.handle.exit() is None
        large.handle.signal(signal.SIGTERM)
        assert large.exit() == Exit(143, "SIGTERM", "it waited for room in the Ray cluster")

    def test_servers_find_room_though_workers_want_everything(self, ray: Any) -> None:
        from rallypoint.launch.engines.ray import RayCluster

        with RayCluster(servers=2, cpus=2.0) as cluster:
            workers = [Started(cluster, "import time; time.sleep(1000)", name=f"worker{n}") for n in range(4)]
            said: list[str] = []
            code = "print('here', flush=True); import time; time.sleep(1000)"
            for n in range(2):
                argv = (sys.executable, "-c", code)
                cluster.start(Command(name=f"server{n}", role="server", argv=argv), said.append)
            until(lambda: len(said) == 2 and [w.handle.begun for w in workers].count(None) == 1)  # type: ignore[attr-defined]
