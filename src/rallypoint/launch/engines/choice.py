"""Which engine starts a run's processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from rallypoint.errors import UsageError, meant
from rallypoint.launch.engines.cluster import Cluster
from rallypoint.launch.engines.slurm.requeue import AGAIN, requeue
from rallypoint.launch.plan import Launch

ENGINES = ("local", "ray", "slurm", "ssh")


def check_engine(name: str) -> None:
    """Raise UsageError unless there is an engine of this name."""
    if name not in ENGINES:
        known = f"; the engines are {', '.join(ENGINES)}"
        raise UsageError(f"there is no engine {name}{meant(name, ENGINES) or known}")


@contextlib.contextmanager
def cluster_of(plan: Launch, say: Callable[[str], None]) -> Iterator[Cluster]:
    """While in the body, the cluster that the plan names. At the end of the body none of its processes is left.

    `say` gets a sentence about each machine that cannot be used.
    """
    check_engine(plan.engine)
    match plan.engine:
        case "ray":
            from rallypoint.launch.engines.ray import RayCluster

            with RayCluster(
                plan.address or "auto", folder=plan.folder, snapshots=plan.snapshots, servers=plan.servers,
                cpus=plan.threads, gpus=plan.gpus, say=say,
            ) as nodes:  # fmt: skip
                yield nodes
        case "ssh":
            from rallypoint.launch.engines.ssh import SshCluster

            with SshCluster(plan, say) as machines:
                yield machines
        case "slurm":
            from rallypoint.launch.engines.slurm.cluster import SlurmCluster

            with SlurmCluster(plan, say) as nodes:
                yield nodes
        case _:
            from rallypoint.launch.engines.local import LocalCluster

            with LocalCluster() as cluster:
                yield cluster


def notices_of(plan: Launch) -> tuple[signal.Signals, ...]:
    """The signals by which the plan's engine says that it will end the launcher soon, and may run it again."""
    return AGAIN if plan.engine == "slurm" else ()


def run_again(plan: Launch) -> str:
    """Ask the plan's engine to run this job again, after a notice. Returns what to tell, "" if nothing."""
    if plan.engine != "slurm":
        return ""
    if why := requeue():
        return f"Slurm does not run this job again: {why}"
    return "Slurm runs this job again, and it goes on from there"
