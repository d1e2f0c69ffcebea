"""Processes on the nodes of a Slurm job: the cluster of ``rallypoint run --engine slurm``, inside of a job.

One step of the job on each node starts and ends the processes there. They are Slurm's: it counts what they use, and no
process outlives the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from rallypoint.launch.engines.remote.cluster import RemoteCluster
from rallypoint.launch.engines.remote.hosts import Host
from rallypoint.launch.engines.remote.link import RemoteShell
from rallypoint.launch.engines.slurm.allocation import (
    AGAIN,
    gpus_on_node,
    hosts_of_job,
    node_and_component,
    nodes_of_list,
    requeue,
)
from rallypoint.launch.plan import Launch

_STEP = "rallypoint.launch.engines.slurm.step"


class SlurmCluster(RemoteCluster):
    """Starts processes on the nodes of this job; a context manager that leaves none behind."""

    notices = AGAIN

    @classmethod
    def run_again(cls) -> str:
        """Let Slurm run this job again."""
        if why := requeue():
            return f"Slurm does not run this job again: {why}"
        return "Slurm runs this job again, and it goes on from there"

    def __init__(self, plan: Launch, say: Callable[[str], None]) -> None:
        """`say`: see `RemoteCluster`. Raises UsageError outside of a job, or when the folders cannot be written."""
        hint = "is this environment at the same path on every node?"
        shell = RemoteShell("srun", lambda host: srun_command(host, os.environ), None, hint)
        super().__init__(plan, hosts_of_job(os.environ, nodes_of_list), shell, say)


def srun_command(host: Host, environ: Mapping[str, str]) -> list[str]:
    """Return the command that starts the far end on a node, with all that the job has there."""
    node, component = node_and_component(host)
    gpus = gpus_on_node(environ, host)
    return [
        "srun", *([f"--het-group={component}"] if component else []), "--nodes=1", "--ntasks=1", f"--nodelist={node}",
        "--overlap", "--cpu-bind=none", "--mem=0", "--unbuffered", "--kill-on-bad-exit=1", "--job-name=rallypoint",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        host.python, "-P", "-m", _STEP,
    ]  # fmt: skip
