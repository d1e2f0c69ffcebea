"""Jobs on Ray with several nodes on this machine: what the loss of a node changes, and what it does not."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import add_node, no_leaks, ray_nodes
from rich.console import Console

from rallypoint.launch.commands.chaos import _last_of
from rallypoint.launch.console import RunConsole
from rallypoint.launch.plan import HERE, Launch, read_plan
from rallypoint.launch.run import ClusterRun, launch

pytestmark = [
    pytest.mark.programs, pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="no ray: pip install ray"),
]  # fmt: skip

# From step 60 on it waits for a file: until then a test has done what it is about.
SCRIPT = """
import os, time, torch, rallypoint as rp
from beside import width
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 4))
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
with rp.join() as job:
    for micro in job.train(model, data, replicas=4, batch=4, steps=STEPS, network=rp.Network(shard_bytes=1024)):
        with micro:
            x, y = micro.batch
            micro.backward((model(x) - y).square().mean())
        while micro.step >= 60 and not os.path.exists("GO"):
            time.sleep(0.02)
"""
STEPS = 120
PATIENCE_S = 450.0  # with all of the suite beside it, Ray has needed 90 s to start six processes
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "recovery_ray.py"
ALONE: dict[str, Any] = {"workers": (1, 1), "workers_start": 1, "servers": 1}  # what others are compared with
Act = Callable[[ClusterRun], bool]


def launched(folder: Path, intervene: Act | None = None, *, steps: int = STEPS, **options: Any) -> str:
    """Run SCRIPT to its end. `intervene` is called until it returns False. Returns what the console said."""
    home = folder / "home"
    home.mkdir(parents=True)
    (home / "beside.py").write_text("width = 32")
    script = home / "script.py"
    go = home / "go"
    script.write_text(SCRIPT.replace("STEPS", str(steps)).replace("GO", str(go)))
    run, said, going = folder / "run", io.StringIO(), [intervene is not None]
    plan = Launch(
        worker=(sys.executable, str(script)), script=str(script), folder=str(run), snapshots=str(run / "snapshots"),
        snapshot_seconds=0.0, hang_after=0.0, **{"heartbeat": 10.0} | options,
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S

    def look(run: ClusterRun) -> None:
        assert time.monotonic() < deadline, said.getvalue()
        going[0] = going[0] and intervene is not None and intervene(run)
        if not going[0]:
            go.touch()

    status = launch(plan, RunConsole(Console(file=said, width=1000, highlight=False)), look)
    assert status == 0, said.getvalue()
    assert not going[0], said.getvalue()
    return said.getvalue()


def places(run: ClusterRun, *roles: str) -> dict[str, tuple[str, int]]:
    """The node and the process id of each process of these roles that runs."""
    running = {handle.command.name: handle.begun for role in roles for handle in run.of_role(role)}  # type: ignore[attr-defined]
    return {name: (begun.node, begun.pid) for name, begun in running.items() if begun is not None}


def weights_of(folder: Path) -> str:
    """The SHA-256 of the last snapshot's model."""
    return _last_of(read_plan(folder / "run"))[1]


@pytest.fixture(autouse=True)
def _leak_police() -> Iterator[None]:
    """Instead of that of all tests."""
    yield from no_leaks()


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A node for the driver, without CPUs, and two with three CPUs."""
    with ray_nodes(0, 3, 3) as cluster:
        yield cluster


def test_a_node_lost_without_grace_changes_no_byte_and_restarts_nobody_else(tmp_path: Path, nodes: Any) -> None:
    before: dict[str, tuple[str, int]] = {}
    after: dict[str, tuple[str, int]] = {}
    lost: list[str] = []
    roles = ("coordinator", "server", "worker")

    def intervene(run: ClusterRun) -> bool:
        if not before and run.console.state.step > 20 and len(places(run, *roles)) == 7:
            before.update(places(run, *roles))
            gone = sorted(nodes.worker_nodes, key=lambda node: node.node_id)[0]
            lost.append(gone.node_id)
            nodes.remove_node(gone, allow_graceful=False)
            add_node(nodes, 3)
        elif before and len(now := places(run, *roles)) == 7 and not any(node in lost for node, _ in now.values()):
            after.update(now)
            members = run.console.state.view
            return members is None or not {"worker4", "worker5", "server2"} <= {*members.workers, *members.servers}
        return True

    options = {"workers": (2, 4), "workers_start": 4, "servers": 2, "replication": 2}
    said = launched(tmp_path / "ray", intervene, engine="ray", bind=f"{HERE}:0", **options)
    launched(tmp_path / "local", **ALONE)
    assert weights_of(tmp_path / "ray") == weights_of(tmp_path / "local")
    stayed = {name: place for name, place in before.items() if place[0] not in lost}
    assert len(stayed) == 4  # the coordinator, a server, two workers
    assert stayed.items() <= after.items()
    assert said.count("its node is gone: starting another") >= 1


def test_a_node_that_is_about_to_go_hands_over_and_a_killed_coordinator_comes_back(tmp_path: Path, nodes: Any) -> None:
    going: list[str] = []
    told: list[str] = []

    def intervene(run: ClusterRun) -> bool:
        if not going and run.console.state.step > 20 and len(places(run, "server", "worker")) == 6:
            (coordinator,) = run.of_role("coordinator")
            coordinator.signal(signal.SIGKILL)
            going.append(min(node.node_id for node in nodes.worker_nodes))
            told.extend(name for name, (node, _) in places(run, "server", "worker").items() if node in going)
            drain(going[0])
            add_node(nodes, 3)
        members = run.console.state.view
        here = set() if members is None else {*members.workers, *members.servers}
        return not going or not {"worker4", "worker5", "server2"} <= here or bool(here & set(told))

    # A member that leaves waits a heartbeat for the coordinator, which takes over 10 s to return on a busy machine.
    options = {"workers": (2, 4), "workers_start": 4, "servers": 2, "replication": 2, "heartbeat": 60.0}
    said = launched(tmp_path / "ray", intervene, engine="ray", bind=f"{HERE}:0", **options)
    launched(tmp_path / "local", **ALONE)
    assert weights_of(tmp_path / "ray") == weights_of(tmp_path / "local")
    assert len(told) == 3
    for name in told:
        assert f"{name} was killed (SIGTERM): its node is about to go: starting another" in said
        assert f"{name} is gone" not in said  # it has left
    assert "coordinator was killed (SIGKILL): starting another" in said


def drain(node: str) -> None:
    """Tell Ray that this node will be taken away, as a cloud's notice or `ray drain-node` does."""
    import ray
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(time.time() * 1000) + 600_000
    accepted, why = ray._private.worker.global_worker.gcs_client.drain_node(node, reason, "spot", deadline_ms)
    assert accepted, why


def test_the_benchmark_of_lost_nodes_counts_stalls_and_restarts(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    argv = [sys.executable, str(BENCHMARK), "--jobs", "1", "--losses", "1", "--workers", "2", "--nodes", "3"]
    done = subprocess.run(
        [*argv, "--step", "0.4", "--json", str(figures)], capture_output=True, text=True, timeout=280, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(figures.read_text())["jobs"]
    assert len(found["stalls"]) == 1
    assert found["restarted"] == 0
