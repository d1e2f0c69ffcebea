"""Jobs on Ray with several nodes on this machine: what the loss of a node changes, and what it does not."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rallypoint.launch import launcher
from rallypoint.launch.chaos.chaos import _hash
from rallypoint.launch.console import RunConsole
from rallypoint.launch.engines import ray as engine
from rallypoint.launch.plan import HERE, Launch, read_plan
from rallypoint.launch.run import ClusterRun

pytest.importorskip("ray")
pytestmark = [pytest.mark.programs, pytest.mark.slow]

SCRIPT = """
import torch, rallypoint as rp
from beside import width
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 4))
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
with rp.join() as job:
    for micro in job.train(model, data, replicas=4, batch=4, steps=STEPS, shard_bytes=1024):
        with micro:
            x, y = micro.batch
            micro.backward((model(x) - y).square().mean())
            import time; time.sleep(0.01)
"""
STEPS = 600
Act = Callable[[ClusterRun], bool]


def launched(folder: Path, intervene: Act | None = None, *, steps: int = STEPS, **options: Any) -> str:
    """Run SCRIPT to its end. `intervene` is called until it returns False. Returns what the console said."""
    home = folder / "home"
    home.mkdir(parents=True)
    (home / "beside.py").write_text("width = 32")
    script = home / "script.py"
    script.write_text(SCRIPT.replace("STEPS", str(steps)))
    run, said, going = folder / "run", io.StringIO(), [intervene is not None]
    plan = Launch(
        worker=(sys.executable, str(script)), script=str(script), folder=str(run), snapshots=str(run / "snapshots"),
        snapshot_seconds=0.0, heartbeat=10.0, **options,
    )  # fmt: skip
    deadline = time.monotonic() + 100.0

    def look(run: ClusterRun) -> None:
        assert time.monotonic() < deadline, said.getvalue()
        if intervene is not None and going[0]:
            going[0] = intervene(run)

    status = launcher.launch(plan, RunConsole(Console(file=said, width=1000, highlight=False)), look)
    assert status == 0, said.getvalue()
    assert not going[0], said.getvalue()
    return said.getvalue()


def places(run: ClusterRun, *roles: str) -> dict[str, tuple[str, int]]:
    """The node and the process id of each process of these roles that runs."""
    running = {handle.command.name: handle.begun for role in roles for handle in run.of_role(role)}  # type: ignore[attr-defined]
    return {name: (begun.node, begun.pid) for name, begun in running.items() if begun is not None}


def weights_of(folder: Path) -> str:
    """The SHA-256 of the last snapshot's model."""
    return _hash(read_plan(folder / "run"))


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A node for the driver, without CPUs, and two with three CPUs."""
    from ray_nodes import ray_nodes

    with ray_nodes(0, 3, 3) as cluster:
        yield cluster


def test_a_node_lost_without_grace_changes_no_byte_and_restarts_nobody_else(tmp_path: Path, nodes: Any) -> None:
    before: dict[str, tuple[str, int]] = {}
    after: dict[str, tuple[str, int]] = {}
    lost: list[str] = []
    roles = ("coordinator", "server", "worker")

    def intervene(run: ClusterRun) -> bool:
        if not before and run.console.steps_done > 40 and len(places(run, *roles)) == 7:
            before.update(places(run, *roles))
            gone = sorted(nodes.worker_nodes, key=lambda node: node.node_id)[0]
            lost.append(gone.node_id)
            nodes.remove_node(gone, allow_graceful=False)
            nodes.add_node(num_cpus=3, object_store_memory=80 * 2**20)
        elif before and len(now := places(run, *roles)) == 7 and not any(node in lost for node, _ in now.values()):
            after.update(now)
            return False
        return True

    options = {"workers": (2, 4), "workers_start": 4, "servers": 2, "replication": 2}
    said = launched(tmp_path / "ray", intervene, engine="ray", bind=f"{HERE}:0", **options)
    print(said)
    launched(tmp_path / "local", **options)
    assert weights_of(tmp_path / "ray") == weights_of(tmp_path / "local")
    stayed = {name: place for name, place in before.items() if place[0] not in lost}
    assert len(stayed) == 4  # the coordinator, a server, two workers
    assert stayed.items() <= after.items()
    assert said.count("its node is gone: starting another") >= 1
