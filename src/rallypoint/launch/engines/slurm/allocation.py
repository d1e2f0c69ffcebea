"""What Slurm has given a job, as its environment says, and how it is asked to run the job again.

A job of one component runs every role anywhere. A heterogeneous job of two runs the coordinator, servers and
aggregators on the nodes of the first, workers on those of the second. Slurm writes component 1 of job 12 as 12+1, and
so its node n3 is n3+1 here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from rallypoint.errors import UsageError
from rallypoint.launch.engines.remote.hosts import Host

_FIRST, _SECOND = ("coordinator", "server", "aggregator"), ("worker",)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
AGAIN = (signal.SIGUSR1, signal.SIGUSR2)  # what asks a job to end and to be run again
_SCONTROL_S = 60.0


def hosts_of_job(environ: Mapping[str, str], nodes_of: Callable[[str], Sequence[str]]) -> tuple[Host, ...]:
    """Return the nodes of this job as hosts; the coordinator's is the first. `nodes_of` returns the nodes of a list.

    Raises UsageError outside of a job, and for more than two components.
    """
    if "SLURM_JOB_ID" not in environ:
        raise UsageError(
            "--engine slurm is for inside of a Slurm job: `rallypoint slurm train.py > job.sbatch` writes one for "
            "sbatch; or run it under salloc"
        )
    components = int(environ.get("SLURM_HET_SIZE", "1"))
    if components == 1:
        return _component(environ, "", (), nodes_of)
    if components > 2:
        raise UsageError(f"a job of {components} components: one for servers and one for workers, or one in all")
    return tuple(
        host
        for number, roles in enumerate((_FIRST, _SECOND))
        for host in _component(environ, f"_HET_GROUP_{number}", roles, nodes_of)
    )


def node_and_component(host: Host) -> tuple[str, str]:
    """Return the node, and the number of its component; "" in a job of one."""
    node, _, component = host.name.partition("+")
    return node, component


def gpus_on_node(environ: Mapping[str, str], host: Host) -> str:
    """Return how many GPUs a job that asked for some for each task has on this node, as ``4`` or ``h100:4``; else "".

    A step of one task would get one task's share of them.
    """
    component = node_and_component(host)[1]
    each = environ.get(f"SLURM_GPUS_PER_TASK_HET_GROUP_{component}" if component else "SLURM_GPUS_PER_TASK", "")
    kind, colon, count = each.rpartition(":")
    return f"{kind}{colon}{int(count) * host.slots}" if count.isdecimal() else ""


def nodes_of_list(text: str) -> Sequence[str]:
    """Return the nodes that ``n[1-3,7]`` stands for. Raises UsageError where ``scontrol`` cannot say."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=_SCONTROL_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"scontrol does not say which nodes {text} are: {error}") from None
    return done.stdout.split()


def tasks_per_node(text: str) -> list[int]:
    """Return how many tasks each node has: ``2(x3),1`` is 2, 2, 2, 1. Raises UsageError if it is not such a text."""
    counts: list[int] = []
    for part in text.split(","):
        if (match := _TASKS.fullmatch(part)) is None:
            raise UsageError(f"'{text}' does not say how many tasks each node has")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _component(
    environ: Mapping[str, str], suffix: str, roles: tuple[str, ...], nodes_of: Callable[[str], Sequence[str]]
) -> tuple[Host, ...]:  # fmt: skip
    nodes = nodes_of(environ[f"SLURM_JOB_NODELIST{suffix}"])
    tasks = tasks_per_node(environ.get(f"SLURM_TASKS_PER_NODE{suffix}", f"1(x{len(nodes)})"))
    mark = f"+{suffix[-1]}" if suffix else ""
    return tuple(
        Host(f"{node}{mark}", roles=roles, slots=count) for node, count in zip(nodes, tasks, strict=True) if count
    )




def requeue() -> str:
    """Ask Slurm to run this job again, and return "". Slurm ends this process then. Else, return why it does not."""
    job = os.environ.get("SLURM_JOB_ID", "")
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_SCONTROL_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())
