"""The job script that `rallypoint slurm` writes for ``sbatch``. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.errors import UsageError

_SERVER_CPUS, _LEAD = 2, 120  # cores of a server, and seconds before the limit at which the last version is stored
FOLDER = "runs/slurm-$SLURM_JOB_ID"  # a job that is requeued keeps its number
_PLAIN = re.compile(r"[^\s\"'\\#]*")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a job script asks Slurm for.

    Attributes:
        name: the job's name.
        servers, aggregators, workers: how many processes; of 2:8 workers, 8.
        together: one component, with servers on the workers' nodes (each worker's task has cores for its share of
            them); else a heterogeneous job of two.
        worker_cpus: cores of each worker.
        gpus: of each worker.
        time: the job's limit, as Slurm writes it (``4:00:00``); "": the partition's.
        lines: more options for ``#SBATCH``, for each component.
    """

    name: str
    workers: int
    servers: int
    aggregators: int = 0
    together: bool = False
    worker_cpus: int = 1
    gpus: int = 0
    time: str = ""
    lines: Sequence[str] = ()

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
        text += _sbatch(each)
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
        f"exec {_quoted(command)}",
    ]
    return "\n".join(text) + "\n"


def _resources(tasks: int, cpus: int, gpus: int) -> list[str]:
    return [
        f"--ntasks={tasks}",
        f"--cpus-per-task={cpus}",
        *([f"--gpus-per-task={gpus}"] if gpus else []),
    ]


def _sbatch(options: Sequence[str]) -> list[str]:
    """Slurm reads quotes as a shell does, but no variables."""
    words = [option.partition("=") for option in options]
    return [f"#SBATCH {name}{equals}{_in_quotes(value)}" for name, equals, value in words]


def _in_quotes(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quoted(command: Sequence[str]) -> str:
    """The command as a shell reads it; the default folder's variable stays one."""
    return " ".join(f'"{word}"' if word == FOLDER else shlex.quote(word) for word in command)
