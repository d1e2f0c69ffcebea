"""Which engine starts a run's processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from rallypoint.errors import UsageError, meant
from rallypoint.launch.engines.cluster import Cluster
from rallypoint.launch.engines.gpus import devices_of
from rallypoint.launch.plan import Launch

ENGINES = ("local", "ray", "slurm", "ssh")


def check_engine(name: str) -> None:
    """Raise UsageError unless there is an engine of this name."""
    if name not in ENGINES:
        known = f"; the engines are {', '.join(ENGINES)}"
        raise UsageError(f"there is no engine {name}{meant(name, ENGINES) or known}")


def kind_of(engine: str) -> type[Cluster]:
    """Return the class of this engine's clusters. Raises UsageError if there is no such engine."""
    check_engine(engine)
    match engine:
        case "ray":
            from rallypoint.launch.engines.ray import RayCluster

            return RayCluster
        case "ssh":
            from rallypoint.launch.engines.ssh import SshCluster

            return SshCluster
        case "slurm":
            from rallypoint.launch.engines.slurm.cluster import SlurmCluster

            return SlurmCluster
    from rallypoint.launch.engines.local import LocalCluster

    return LocalCluster


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
                cpus=plan.threads_at_first, gpus=plan.gpus, say=say,
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

            # A worker that is a group takes its share by itself.
            with LocalCluster(gpus=devices_of(os.environ) if plan.ranks == 1 else ()) as cluster:
                yield cluster
