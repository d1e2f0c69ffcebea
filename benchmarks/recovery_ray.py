"""What the loss of a Ray node costs: the time without a finished step, and whether anybody else was restarted.

    python benchmarks/recovery_ray.py                  # 3 jobs, 7 nodes lost in each (pip install -e '.[ray]')

Each job has several raylets on this machine, and one worker standing by. Nodes are removed without grace, one after the
other has been made good: the raylet gets SIGKILL, and what it had started ends with it. A machine whose power fails
says nothing: there the job's heartbeat (3 s) comes before all that is measured here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from rallypoint.launch.commands.chaos import Event, ledger_of, measure, typical_gap
from rallypoint.launch.console import RunConsole
from rallypoint.launch.plan import HERE, Launch
from rallypoint.launch.run import ClusterRun, launch

BATCH, SERVERS, STANDBY = 8, 2, 1
_BETWEEN = 8  # steps that are finished undisturbed before the next node is lost
_STORE_BYTES = 80 << 20  # the least that Ray takes for its object store
_OFF = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@dataclass(slots=True)
class Losses:
    """Removes nodes from a run's Ray cluster; `intervene` is called again and again while the job runs."""

    nodes: Any  # ray.cluster_utils.Cluster
    wanted: int
    cpus: int
    processes: int
    events: list[Event] = field(default_factory=list)
    restarted: int = 0  # processes that ended though their node was there
    _due: int = _BETWEEN
    _known: dict[str, tuple[str, int]] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)

    def intervene(self, run: ClusterRun) -> None:
        """Remove a node when everybody is there and some steps were finished since the last loss."""
        if run.console.finished:
            return  # everybody ends
        here = _places(run)
        missed = [name for name, (node, _) in self._known.items() if node not in self._gone and name not in here]
        self.restarted += len(missed)
        self._known = {name: place for name, place in self._known.items() if name not in missed} | here
        members = run.console.state.view
        joined = set() if members is None else {*members.workers, *members.standby, *members.servers}
        whole = len(here) == self.processes and not any(node in self._gone for node, _ in here.values())
        if not (whole and joined == here.keys() - {"coordinator"}):
            self._due = run.console.state.step + _BETWEEN
        elif len(self.events) < self.wanted and run.console.state.step >= self._due:
            self._lose_one(run, here)

    def _lose_one(self, run: ClusterRun, here: dict[str, tuple[str, int]]) -> None:
        used = {node for node, _ in here.values()}
        nodes = sorted((n for n in self.nodes.worker_nodes if n.node_id in used), key=lambda node: node.node_id)
        node = nodes[len(self.events) % len(nodes)]
        names = ", ".join(sorted(name for name, (where, _) in here.items() if where == node.node_id))
        self._gone.add(node.node_id)
        self.events.append(Event(time.time(), "lose a node", names, run.console.state.step, run.console.state.again))
        self.nodes.remove_node(node, allow_graceful=False)
        self.nodes.add_node(num_cpus=self.cpus, object_store_memory=_STORE_BYTES)


def _places(run: ClusterRun) -> dict[str, tuple[str, int]]:
    """The node and the process id of each process that runs."""
    handles = [handle for role in ("coordinator", "server", "worker") for handle in run.of_role(role)]
    begun: dict[str, Any] = {handle.command.name: getattr(handle, "begun", None) for handle in handles}
    return {name: (where.node, where.pid) for name, where in begun.items() if where is not None}


@contextlib.contextmanager
def _ray(nodes: int, cpus: int) -> Iterator[Any]:
    """While in the body, a Ray cluster on this machine: a node without CPUs for the driver, and so many others."""
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        os.environ.update(_OFF, RAY_TMPDIR=folder)
        cluster = Cluster(shutdown_at_exit=False)
        try:
            for number in range(nodes + 1):
                first = {"include_dashboard": False} if number == 0 else {}
                cluster.add_node(num_cpus=cpus if number else 0, object_store_memory=_STORE_BYTES, **first)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", namespace="rallypoint")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def job(losses: int, workers: int, nodes: int, step: float, console: Console) -> dict[str, Any]:
    """Train once, and lose so many nodes. Returns the stalls beyond a usual step in seconds, and that step's."""
    processes = workers + STANDBY + SERVERS
    cpus = -(-processes // (nodes - 1))  # so that all find room while one node is away
    steps = int((losses + 1) * 22.0 / step)  # Ray takes 15 s to notice, and a new process some to import torch
    with _ray(nodes, cpus) as cluster, tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        plan = Launch(
            worker=(sys.executable, str(Path(__file__).with_name("recovery_member.py")), str(steps), str(workers),
                    str(step)),
            workers=(1, workers), workers_start=workers, standby=STANDBY, servers=SERVERS, replication=2,
            folder=str(folder), snapshots=str(folder / "snapshots"), snapshot_seconds=10.0, engine="ray",
            bind=f"{HERE}:0",
        )  # fmt: skip
        driver = Losses(cluster, losses, cpus, processes + 1)
        with (Path(parent) / "console.txt").open("w") as log:
            status = launch(plan, RunConsole(Console(file=log, highlight=False)), driver.intervene)
        if status or len(driver.events) < losses:
            raise SystemExit(f"the run failed: {(Path(parent) / 'console.txt').read_text()[-2000:]}")
        ledger = ledger_of(folder, steps, steps * workers * BATCH)
    if not ledger.exact:
        raise SystemExit(f"the ledger is not exact: {ledger.missing} {ledger.wrong}")
    usual = typical_gap(ledger.times)
    stalls = [max(0.0, found.stall - usual) for found in measure(driver.events, ledger)]
    names = [event.whom for event in driver.events]
    for lost, stall in zip(names, stalls, strict=True):
        console.print(f"lost a node with {lost}: {stall:.2f} s beyond a usual step of {usual:.3f} s")
    return {"stalls": stalls, "ended": names, "restarted": driver.restarted, "step": usual}


def command(
    losses: Annotated[int, typer.Option(min=1, help="Nodes lost in each job.")] = 7,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs, one after the other.")] = 3,
    workers: Annotated[int, typer.Option(min=2, help="Workers, and one standing by.")] = 4,
    nodes: Annotated[int, typer.Option(min=3, help="Ray nodes, besides that of the driver.")] = 4,
    step: Annotated[float, typer.Option(min=0.02, help="Seconds of a replica's step.")] = 0.25,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Measure what the loss of a Ray node costs."""
    console = Console(highlight=False)
    found = [job(losses, workers, nodes, step, console) for _ in range(jobs)]
    stalls = sorted(stall for one in found for stall in one["stalls"])
    shown = Table("nodes lost", "jobs", "stall p50", "p90", "max", "restarted elsewhere", title="beyond a usual step")
    shown.add_row(
        str(len(stalls)), str(jobs), f"{stalls[len(stalls) // 2]:.2f} s", f"{stalls[int(0.9 * len(stalls))]:.2f} s",
        f"{stalls[-1]:.2f} s", str(sum(one["restarted"] for one in found)),
    )  # fmt: skip
    console.print(shown)
    if json is not None:
        options = {"losses": losses, "jobs": jobs, "workers": workers, "nodes": nodes, "step": step}
        json.write_bytes(msgspec.json.format(msgspec.json.encode({"options": options, "jobs": found}), indent=2))


if __name__ == "__main__":
    typer.run(command)
