"""Commands that start a job on this machine, or go on with one: run, train, chaos, resume; and plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rallypoint.cli.app import AFTER, PASS_ON, START, app
from rallypoint.cli.given import (
    hint_at_folder,
    hint_at_misplaced,
    hint_at_page,
    recipe_argv,
    refuse_option,
    sizes,
    without_settings,
)
from rallypoint.config import overrides_from
from rallypoint.errors import UsageError
from rallypoint.launch.commands.costing import CostOptions
from rallypoint.launch.options import ConfigFile, RunFolder, RunOptions, Sets, check_script, with_changes, with_options

_CHAOS = RunOptions(standby=1, snapshot_seconds=10.0)
_FAULTS = "Faults"


@app.command(context_settings=PASS_ON, rich_help_panel=START)
@with_options(RunOptions)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your training script; everything after it is passed on to it.")],
    options: RunOptions,
) -> None:
    """Run a script on a cluster of processes on this machine, or with --hosts on others.

    Processes that die are started again. Ctrl-C ends all of them; [bold]rallypoint resume[/bold] goes on from the last
    snapshot. Workers run a copy of the script and of the modules next to it, so editing them does not touch the run.

    Example: [bold]rallypoint run --workers 4 --servers 2 train.py --my-option 3[/bold]
    """
    refuse_option(context, str(script), "script")
    check_script(script)
    hint_at_misplaced(context, context.args, f"{script}")
    _launch([sys.executable, str(script), *context.args], options, script=str(script))


@app.command(context_settings=PASS_ON, rich_help_panel=START)
@with_options(RunOptions)
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="gpt, resnet; all after it is passed on to the recipe.")],
    options: RunOptions,
) -> None:
    """Train a ready-made recipe on real data.

    Example: [bold]rallypoint train gpt --data my/texts --steps 500[/bold]; its own options: rallypoint train gpt --help
    """
    refuse_option(context, recipe, "recipe")
    arguments, settings = without_settings(context.args)
    hint_at_misplaced(context, arguments, recipe)
    _launch(recipe_argv(recipe, arguments), options, settings=settings)


@app.command(context_settings=PASS_ON, rich_help_panel=START)
@with_options(RunOptions, _CHAOS)
def chaos(
    context: typer.Context, options: RunOptions,
    recipe: Annotated[str, typer.Argument(help="gpt, resnet; all after it is passed on to it.")] = "gpt",
    kills: Annotated[int, typer.Option(
        min=0, metavar="N", rich_help_panel=_FAULTS,
        help="SIGKILLs, spread over all roles; a worker is stopped (SIGSTOP) for a while too.",
    )] = 10,
    resizes: Annotated[str, typer.Option(
        metavar="N,N,..", rich_help_panel=_FAULTS, help="Numbers of workers to change to on the way, as 4,1,3.",
    )] = "",
    everything: Annotated[bool, typer.Option(
        "--everything", rich_help_panel=_FAULTS, help="Kill every process at once in the middle, and resume.",
    )] = False,
    seed: Annotated[int, typer.Option(
        metavar="N", rich_help_panel=_FAULTS, help="Of the order of faults and of who is hit.",
    )] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report to this file too.")] = None,
) -> None:  # fmt: skip
    """Train a recipe twice, undisturbed and while its processes are killed: do both end with the same bytes?

    Example: [bold]rallypoint chaos --kills 40 --resizes 4,1,3 gpt --steps 1500[/bold]
    """
    from rallypoint.launch.commands.chaos import chaos as play
    from rallypoint.launch.commands.chaos import random_faults
    from rallypoint.launch.console import Screen

    refuse_option(context, recipe, "recipe")
    faults = random_faults(kills, sizes(resizes), everything, seed, options.servers, options.aggregators)
    arguments, settings = without_settings(context.args)
    argv = recipe_argv(recipe, arguments)
    if options.or_resume:
        raise UsageError("chaos has no --or-resume: both of its runs begin anew (--overwrite deletes earlier ones)")
    plan = options.run(argv, more_settings=settings)
    if not plan.snapshots:
        raise UsageError("chaos compares the last snapshots of two runs: leave out --snapshots none")
    raise typer.Exit(play(
        plan, faults, seed, Screen(), json=json, overwrite=options.overwrite,
        made=not options.folder,
    ))  # fmt: skip


@app.command(rich_help_panel=AFTER)
@with_changes("workers", "servers", "ranks", "bind", "advertise")
def resume(
    run: RunFolder,
    changes: dict[str, Any],
    original: Annotated[bool, typer.Option(
        "--original", help="Run the code as it was when the run began, not as it is now.",
    )] = False,
    config: ConfigFile = None, sets: Sets = None,
) -> None:  # fmt: skip
    """Go on with a run from its newest usable snapshot: nothing else is needed.

    This runs the command that the folder's run.json says, with its arguments. So a folder that another user owns or may
    write is refused; read run.json before you resume a run that somebody gave you.

    Settings may change: a lower learning rate or [bold]--set clip=1.0[/bold] after a loss that was not finite, more
    steps. Settings that the snapshot depends on (replicas, batch, seed, groups, sync, ...) cannot.

    Example: [bold]rallypoint resume runs/20260131-235959 --set optimizer.lr=1e-4[/bold]
    """
    from rallypoint.launch.commands.resume import going_on
    from rallypoint.launch.console import RunConsole
    from rallypoint.launch.run import launch

    settings, say = overrides_from(config, sets or []), lambda text: print(text, flush=True)
    plan = going_on(run, say, settings, cluster=changes, original=original)
    raise typer.Exit(launch(plan, RunConsole(), original=original))


@app.command("import", context_settings=PASS_ON, rich_help_panel=START)
@with_options(RunOptions)
def import_(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(
        help="model.safetensors, a .pt file, a Hugging Face folder, or a folder of torch.distributed.checkpoint.",
    )],
    script: Annotated[Path, typer.Argument(help="Your training script; everything after it is passed on to it.")],
    options: RunOptions,
    step: Annotated[int, typer.Option(
        "--step", min=-1, metavar="N", show_default=False, help="Its steps of training, if the checkpoint has none.",
    )] = -1,
    strict: Annotated[bool, typer.Option(
        "--strict", help="Refuse a checkpoint with weights or optimizer states that the script's model lacks.",
    )] = False,
) -> None:  # fmt: skip
    """Begin a run with a checkpoint of plain PyTorch: weights, optimizer's state by parameter name, and the step.

    The script runs up to its job.train, which says what is trained. Then [bold]rallypoint resume[/bold] starts the run,
    with the data and the learning rate of that step. The format of torch.distributed.checkpoint contains a pickle: give
    only checkpoints that you trust.

    Example: [bold]rallypoint import --folder runs/mine ddp-checkpoint train.py[/bold]
    """
    from rallypoint.launch.commands.importing import check_checkpoint, import_checkpoint

    refuse_option(context, str(script), "script")
    check_script(script)
    hint_at_misplaced(context, context.args, f"{script}")
    if options.or_resume:
        raise UsageError(
            "import has no --or-resume: it makes a run and does not start it. `rallypoint resume FOLDER` goes on with "
            "the run that is there; --overwrite makes it anew of the checkpoint"
        )
    check_checkpoint(checkpoint)
    plan = options.run([sys.executable, str(script), *context.args], script=str(script))
    made = not options.folder
    print(import_checkpoint(plan, checkpoint, step, strict=strict, overwrite=options.overwrite, made=made))


def _launch(argv: list[str], options: RunOptions, *, script: str = "", settings: list[str] | None = None) -> None:
    from rallypoint.launch.commands.resume import going_on_or_anew
    from rallypoint.launch.console import RunConsole
    from rallypoint.launch.run import launch

    if options.or_resume and not options.folder:
        raise UsageError("--or-resume which run? give --folder")
    plan, overwrite = options.run(argv, script=script, more_settings=settings), options.overwrite
    if options.or_resume:
        plan, overwrite = going_on_or_anew(plan, lambda text: print(text, flush=True))
    hint_at_folder(plan.folder)
    hint_at_page(options.watch)
    raise typer.Exit(launch(plan, RunConsole(), overwrite=overwrite, made=not options.folder))


@app.command(rich_help_panel=START)
@with_options(CostOptions)
def plan(
    options: CostOptions,
    run: Annotated[Path | None, typer.Argument(
        help="The folder of a run: its own model, settings and times are taken.", show_default=False,
    )] = None,
) -> None:  # fmt: skip
    """Say what a job would cost on some machines: how long a step takes, with how many servers, and would they pay?

    For each layout: seconds a step and the part of it in which GPUs wait, memory, traffic; with --mtbf also what
    failures leave of the time and how often to take snapshots. The last lines recommend one, DDP or FSDP included, and
    the mode to use with servers.

    4 machines without GPUs: [bold]rallypoint plan --model 20M --gpus 4 --link 1Gbit --compute 2s[/bold]

    64 GPUs on 8 hosts: [bold]rallypoint plan --model 7B --gpus 8x8 --link 100Gbit --compute 1.7s[/bold]

    Eight workers on slow links, with failures: [bold]rallypoint plan --model 350M --gpus 8 --link 10Gbit
    --compute 600ms --mtbf 30d[/bold]

    The gain of a run, finished or not, from more servers or bf16: [bold]rallypoint plan
    runs/20260131-235959 --link 10Gbit --codec bf16[/bold]
    """
    from rallypoint.launch.commands.costing import answer
    from rallypoint.launch.console import Screen

    answer(options, run, Screen())
