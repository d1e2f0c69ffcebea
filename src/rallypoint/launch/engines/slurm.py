"""Processes on the nodes of a Slurm job: the cluster of ``rallypoint run --engine slurm``, inside of a job.

One step of the job on each node starts and ends the processes there. They are Slurm's: it counts what they use, and no
process outlives the job.

A job of one component runs every role anywhere. A heterogeneous job of two runs the coordinator, servers and
aggregators on the nodes of the first, workers on those of the second.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rallypoint.errors import Explained, UsageError
from rallypoint.launch.engines.remote import FAR_END, RemoteCluster, RemoteShell
from rallypoint.launch.plan import Host, Launch

_SERVER_CPUS, _LEAD = 2, 120  # cores of a server, and seconds before the limit at which the last version is stored

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
    argv, errors = ["scontrol", "show", "hostnames", text], (OSError, subprocess.SubprocessError)
    with Explained(UsageError, f"scontrol does not say which nodes {text} are", of=errors):
        return subprocess.run(argv, capture_output=True, text=True, timeout=_SCONTROL_S, check=True).stdout.split()


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


FOLDER = "runs/slurm-$SLURM_JOB_ID"  # a job that is requeued keeps its number
_PLAIN = re.compile(r"[^\s\"'\\#]*")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a job script asks Slurm for."""

    name: str  # the job's name
    workers: int  # how many processes, as `servers` and `aggregators`; of 2:8 workers, 8
    servers: int
    aggregators: int = 0
    # One component, with servers on the workers' nodes (each worker's task has cores for its share of them); else a
    # heterogeneous job of two
    together: bool = False
    worker_cpus: int = 1  # cores of each worker
    gpus: int = 0  # of each worker
    time: str = ""  # the job's limit, as Slurm writes it (``4:00:00``); "": the partition's
    lines: Sequence[str] = ()  # more options for ``#SBATCH``, for each component

    def __post_init__(self) -> None:
        if self.time and not _TIME.fullmatch(self.time):
            raise UsageError(f"--time {self.time}: Slurm writes it as 4:00:00, 1-12:00:00 or minutes")
        if wrong := next((line for line in self.lines if not line.startswith("--")), None):
            raise UsageError(f"--sbatch {wrong}: an option of sbatch, as --sbatch=--account=me")
        if "/" in self.name:
            raise UsageError(f"the job's name {self.name}: its output is NAME-JOBID.out, so no / in it")
        for text in (self.name, *self.lines):
            if not text.isprintable():
                raise UsageError(f"{text!r} is not one line of text, as Slurm's options are")


def script_of(batch: Batch, made_by: Sequence[str], command: Sequence[str]) -> str:
    """Return the job script. `made_by` is the command line that asked for it, `command` what runs in the job."""
    general = [
        f"--job-name={batch.name}",
        "--output=%x-%j.out",
        "--open-mode=append",  # a job that is run again goes on with its log
        "--requeue",
        f"--signal=B:USR1@{_LEAD}",
    ]
    each = [
        "--no-kill",  # a node that dies takes its processes along, not the job
        *([f"--time={batch.time}"] if batch.time else []),
        *batch.lines,
    ]
    comment = "# "
    text = [
        "#!/bin/bash",
        f"{comment}Written by: {shlex.join(made_by)}".replace("\n", f"\n{comment}"),
        f"{comment}Submit it with sbatch. It may be edited; Slurm reads the lines that begin with #SBATCH.",
        *_sbatch(general),
    ]
    if batch.together:
        share = -(-(batch.servers + batch.aggregators) * _SERVER_CPUS // batch.workers)
        text += _sbatch(_resources(batch.workers, batch.worker_cpus + share, batch.gpus))
    else:
        servers = batch.servers + batch.aggregators
        text += [f"{comment}The first component: coordinator and servers. They need no GPU."]
        text += _sbatch(_resources(servers, _SERVER_CPUS, 0))
        text += _sbatch(each)
        text += ["#SBATCH hetjob", f"{comment}The second component: workers."]
        text += _sbatch(_resources(batch.workers, batch.worker_cpus, batch.gpus))
    text += _sbatch(each)
    text += [
        "",
        f"{comment}Here: lines of shell before the job, as module load cuda.",
        f"{comment}Seconds before the limit ({_LEAD}), at `scancel --batch --signal=USR1 JOB`, the launcher takes",
        f"{comment}a last snapshot and asks Slurm to run the job again; then, and after a node was lost or the job was",
        f"{comment}preempted, this same command goes on from the newest snapshot.",
        # As a shell reads it; the default folder's variable stays one.
        "exec " + " ".join(f'"{word}"' if word == FOLDER else shlex.quote(word) for word in command),
    ]
    return "\n".join(text) + "\n"


def _resources(tasks: int, cpus: int, gpus: int) -> list[str]:
    return [f"--ntasks={tasks}", f"--cpus-per-task={cpus}", *([f"--gpus-per-task={gpus}"] if gpus else [])]


def _sbatch(options: Sequence[str]) -> list[str]:
    """Slurm reads quotes as a shell does, but no variables."""
    words = [option.partition("=") for option in options]
    return [f"#SBATCH {name}{equals}{_in_quotes(value)}" for name, equals, value in words]


def _in_quotes(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
        host.python, "-P", "-m", FAR_END, *(str(int(number)) for number in AGAIN),
    ]  # fmt: skip
