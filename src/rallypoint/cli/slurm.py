"""``rallypoint slurm``."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rallypoint.cli.app import START, app
from rallypoint.cli.given import hint_at_misspelt, refuse_option
from rallypoint.errors import UsageError
from rallypoint.launch.engines.slurm import FOLDER, Batch, script_of
from rallypoint.launch.options import RunOptions, arguments_of, check_script, with_options
from rallypoint.launch.plan import option, parse_workers

_SLURM = "What Slurm is asked for"
_ANYWHERE = {"allow_extra_args": True, "ignore_unknown_options": True}  # our options may stand after the script too


class SlurmOptions(RunOptions, frozen=True, kw_only=True):
    """The options of a run, and what Slurm is asked for."""

    time: Annotated[str, option(metavar="TIME", panel=_SLURM, help="The job's limit, as 4:00:00.")] = ""
    worker_cpus: Annotated[int, option(
        min=1, metavar="N", panel=_SLURM, help="Cores of each worker; each server gets two.",
    )] = 1  # fmt: skip
    together: Annotated[bool, option(
        "--together", metavar=None, panel=_SLURM,
        help="Servers on the workers' nodes: a plain job. Otherwise it is a heterogeneous one.",
    )] = False  # fmt: skip
    sbatch: Annotated[list[str] | None, option(
        metavar="OPTION", panel=_SLURM,
        help="Another option of sbatch, for servers and workers, as --sbatch=--partition=gpu; may be repeated.",
    )] = None  # fmt: skip


@app.command(context_settings=_ANYWHERE, rich_help_panel=START)
@with_options(SlurmOptions)
def slurm(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your training script, with its own options after it.")],
    options: SlurmOptions,
) -> None:
    """Write a Slurm job that runs a script on many machines: rallypoint slurm ... > job.sbatch; sbatch job.sbatch

    The job asks for the coordinator and servers, and for workers, as two components of one heterogeneous job. The
    folder it is submitted from must be seen by all nodes. Before its time limit it stores the last version and asks to
    be run again; then it goes on from there, as after a preemption or a lost node. Edit the printed script as you
    need: module load, another partition for servers, the seconds before the limit.

    Example: [bold]rallypoint slurm train.py --workers 8 --servers 4 --gpus 1 --time 4:00:00 > job.sbatch[/bold]
    """
    refuse_option(context, str(script), "script")
    check_script(script)
    hint_at_misspelt(context, str(script))
    if options.engine != "local" or options.hosts:
        raise UsageError("a Slurm job runs on the machines that Slurm gives it: without --engine and --hosts")
    ours = msgspec.structs.replace(options, engine="slurm", or_resume=True, gpus=0.0, folder=options.folder or FOLDER)
    ours.run([], script=str(script))  # its options can be used
    words = arguments_of(ours)
    batch = Batch(
        name=script.stem, workers=parse_workers(options.workers)[0][1], servers=options.servers,
        aggregators=options.aggregators, together=options.together, worker_cpus=options.worker_cpus,
        gpus=math.ceil(options.gpus), time=options.time, lines=options.sbatch or (),
    )  # fmt: skip
    command = [sys.executable, "-P", "-m", "rallypoint.cli", "run", *words, str(script), *context.args]
    print(script_of(batch, ["rallypoint", *sys.argv[1:]], command), end="")
