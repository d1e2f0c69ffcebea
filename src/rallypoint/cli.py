"""The command line: ``rallypoint run``, ``rallypoint train``, and the roles that they start."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from rallypoint.config import overrides_from
from rallypoint.errors import ConfigError, RallypointError, UsageError, meant
from rallypoint.launch import environment
from rallypoint.launch.options import (
    Advertise,
    Bind,
    ConfigFile,
    CoordinatorOptions,
    JobAddress,
    RunFolder,
    RunOptions,
    Sets,
    check_script,
    with_options,
)
from rallypoint.net.tcp import TcpTransport

app = typer.Typer(
    help="Data-parallel training for PyTorch: workers compute gradients, servers own the parameters, any of them may "
    "die.\n\nBegin with [bold]rallypoint train gpt[/bold], or with a script of your own: "
    "[bold]rallypoint run train.py[/bold]",
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
_START, _RUNNING, _AFTER, _BY_HAND = "Start a job", "While a job runs", "Afterwards", "A cluster by hand"
_CHAOS = RunOptions(standby=1, replication=2, snapshot_seconds=10.0)
_ALONE = CoordinatorOptions(workers="1", servers=1, snapshots="none")
_FAULTS = "Faults"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rallypoint {version('rallypoint')}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[bool, typer.Option(
        "--version", is_eager=True, callback=_print_version, help="Print the version, and nothing else.",
    )] = False,
) -> None:  # fmt: skip
    """Options that stand before any command."""


@app.command(context_settings=_PASS_ON, rich_help_panel=_START)
@with_options(RunOptions)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your training script; everything after it is passed on to it.")],
    options: RunOptions,
) -> None:
    """Run a script on a cluster of processes on this machine.

    Processes that die are started again. Ctrl-C ends all of them; [bold]rallypoint resume[/bold] goes on from the last
    snapshot. Workers run a copy of the script and of the modules beside it, so editing them does not touch the run.

    Example: [bold]rallypoint run --workers 4 --servers 2 train.py --my-option 3[/bold]
    """
    _refuse_option(context, str(script), "script")
    check_script(script)
    _hint_at_misplaced(context, context.args, f"{script}")
    _launch([sys.executable, str(script), *context.args], options, script=str(script))


@app.command(context_settings=_PASS_ON, rich_help_panel=_START)
@with_options(RunOptions)
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="gpt or resnet; everything after it is passed on to the recipe.")],
    options: RunOptions,
) -> None:
    """Train a ready-made recipe on real data.

    Example: [bold]rallypoint train gpt --data my/texts --steps 500[/bold]; its own options: rallypoint train gpt --help
    """
    _refuse_option(context, recipe, "recipe")
    arguments, settings = _without_settings(context.args)
    _hint_at_misplaced(context, arguments, recipe)
    _launch(_recipe_argv(recipe, arguments), options, settings=settings)


@app.command(context_settings=_PASS_ON, rich_help_panel=_START)
@with_options(RunOptions, _CHAOS)
def chaos(
    context: typer.Context, options: RunOptions,
    recipe: Annotated[str, typer.Argument(help="gpt or resnet; everything after it is passed on to it.")] = "gpt",
    kills: Annotated[int, typer.Option(
        min=0, metavar="N", rich_help_panel=_FAULTS, help="SIGKILLs, spread over all roles.",
    )] = 10,
    stops: Annotated[int, typer.Option(
        min=0, metavar="N", rich_help_panel=_FAULTS, help="SIGSTOPs of a worker, for twice the heartbeat.",
    )] = 1,
    resizes: Annotated[str, typer.Option(
        metavar="N,N,..", rich_help_panel=_FAULTS, help="Numbers of workers to change to on the way, as 4,1,3.",
    )] = "",
    everything: Annotated[bool, typer.Option(
        "--everything", rich_help_panel=_FAULTS, help="Kill every process at once in the middle, and resume.",
    )] = False,
    schedule: Annotated[str, typer.Option(
        metavar="LIST", rich_help_panel=_FAULTS, help="Your own: kill worker, stop server, resize 4, everything, ...",
    )] = "",
    seed: Annotated[int, typer.Option(
        metavar="N", rich_help_panel=_FAULTS, help="Of the random schedule and of who is hit.",
    )] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report to this file too.")] = None,
) -> None:  # fmt: skip
    """Train a recipe twice, undisturbed and while its processes are killed: do both end with the same bytes?

    Example: [bold]rallypoint chaos --kills 40 --resizes 4,1,3 gpt --steps 1500[/bold]
    """
    from rallypoint.launch.chaos.chaos import chaos as play
    from rallypoint.launch.chaos.chaos import parse_faults, random_faults
    from rallypoint.launch.console import Screen

    _refuse_option(context, recipe, "recipe")
    faults = parse_faults(schedule) or random_faults(
        kills, _sizes(resizes), stops, everything, seed, options.servers, options.aggregators
    )
    arguments, settings = _without_settings(context.args)
    plan = options.run(_recipe_argv(recipe, arguments), more_settings=settings)
    raise typer.Exit(play(plan, faults, seed, Screen(highlight=False), json=json, overwrite=options.overwrite))


@app.command(rich_help_panel=_RUNNING)
def resize(
    run: RunFolder,
    workers: Annotated[int, typer.Option(
        "--workers", "-w", min=0, metavar="N", show_default=False, help="Workers that compute, if it is to change.",
    )] = 0,
    servers: Annotated[int, typer.Option(
        "--servers", "-s", min=0, metavar="N", show_default=False, help="Servers, if it is to change.",
    )] = 0,
) -> None:  # fmt: skip
    """Change the number of workers or servers of a running job, and wait until that is done. No step is lost.

    Example: [bold]rallypoint resize runs/20260131-235959 --workers 4 --servers 3[/bold]
    """
    from rallypoint.launch.ask import resize as order

    if not workers and not servers:
        raise UsageError("to what size? give --workers N, --servers N or both")
    print(order(run, workers, servers, lambda text: print(text, flush=True)))


@app.command(rich_help_panel=_RUNNING)
def snapshot(run: RunFolder) -> None:
    """Ask a running job for a snapshot now, and wait until it is durable."""
    from rallypoint.launch.ask import take_snapshot

    print(take_snapshot(run))


@app.command(rich_help_panel=_AFTER)
def resume(
    run: RunFolder,
    workers: Annotated[str, typer.Option(
        "--workers", "-w", metavar="N[:M]", help="Other numbers than before, as 4 or 2:8.",
    )] = "",
    servers: Annotated[int, typer.Option(
        "--servers", "-s", min=0, metavar="N", show_default=False, help="Another number of servers than before.",
    )] = 0,
    original: Annotated[bool, typer.Option(
        "--original", help="Run the code as it was when the run began, not as it is now.",
    )] = False,
    bind: Bind = "", advertise: Advertise = "", config: ConfigFile = None, sets: Sets = None,
) -> None:  # fmt: skip
    """Go on with a run from its newest usable snapshot: nothing else is needed.

    Settings may change: a lower learning rate or [bold]--set clip=1.0[/bold] after a loss that was not finite, more
    steps. What the snapshot depends on (replicas, batch, seed, groups, sync, ...) cannot.

    Example: [bold]rallypoint resume runs/20260131-235959 --set optimizer.lr=1e-4[/bold]
    """
    from rallypoint.launch.commands.resume import Wishes, going_on
    from rallypoint.launch.console import RunConsole
    from rallypoint.launch.launcher import launch

    wishes = Wishes(
        workers=workers, servers=servers, bind=bind, advertise=advertise, settings=overrides_from(config, sets or [])
    )
    plan = going_on(run, wishes, lambda text: print(text, flush=True))
    raise typer.Exit(launch(plan, RunConsole(), original=original))


@app.command(rich_help_panel=_AFTER)
def export(
    snapshot: Annotated[str, typer.Argument(help="A snapshot, a folder of snapshots, or a run's folder.")],
    to: Annotated[Path, typer.Option(help="model.safetensors, or model.pt with the optimizer's state by name.")],
) -> None:
    """Write a snapshot's model as safetensors or as a torch checkpoint.

    Example: [bold]rallypoint export runs/20260131-235959 --to model.safetensors[/bold]
    """
    from rallypoint.store.export import export_snapshot

    print(export_snapshot(snapshot, to))


@app.command(rich_help_panel=_BY_HAND)
@with_options(CoordinatorOptions, _ALONE)
def coordinator(
    options: CoordinatorOptions,
    resume: Annotated[str, typer.Option(metavar="NAME", help="The snapshot to begin with, of --snapshots.")] = "",
    terms: Annotated[str, typer.Option(hidden=True, help="All of how the cluster behaves (Terms), as JSON.")] = "",
    join_info: Annotated[str, typer.Option(hidden=True, help="All that members are told (JoinInfo), as JSON.")] = "",
) -> None:
    """Run the coordinator of one job. Start it first: it prints where it listens.

    The job's token comes in RALLYPOINT_TOKEN; without one, a new one is made, and the way to it is printed. With
    --folder it keeps a journal there: started again at the same address, it goes on.

    Example: [bold]rallypoint coordinator --bind 10.0.0.7:4700 --workers 2 --servers 2[/bold]
    """
    from rallypoint.coordinator.service import JoinInfo
    from rallypoint.core.cluster.terms import Terms
    from rallypoint.launch.commands.by_hand import decoded, described, end_process, run_coordinator

    known, about = described(options.plan([], folder=str(options.folder or "")))
    if terms or join_info:  # from a launcher
        known = decoded(terms or "{}", Terms, "--terms")
        about = decoded(join_info or "{}", JoinInfo, "--join-info")
    end_process(run_coordinator(known, about, bind=options.bind, advertise=options.advertise, resume=resume))


@app.command(rich_help_panel=_BY_HAND)
def server(
    bind: Annotated[str, typer.Option(help="Where workers connect; port 0 is any free one.")] = "127.0.0.1:0",
    coordinator: JobAddress = "",
    id: Annotated[str, typer.Option(help="This server's name; by default RALLYPOINT_ID, or server-PID.")] = "",
    advertise: Advertise = "",
) -> None:
    """Run one server of one job. On SIGTERM it hands its shards over and ends.

    The job's token comes in RALLYPOINT_TOKEN.

    Example: [bold]rallypoint server --coordinator 10.0.0.7:4700 --bind 10.0.0.8:0[/bold]
    """
    from rallypoint.launch.commands.by_hand import address_of, end_process, run_server
    from rallypoint.server.service import ServerService

    address = address_of(coordinator)
    service = ServerService(
        id=id or os.environ.get(environment.ID) or f"server-{os.getpid()}", coordinator=address,
        token=os.environ.get(environment.TOKEN, ""), bind=bind, advertise=advertise, transport=TcpTransport(),
    )  # fmt: skip
    end_process(run_server(service, address))


@app.command(context_settings=_PASS_ON, rich_help_panel=_BY_HAND)
def worker(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your training script; everything after it is passed on to it.")],
    coordinator: JobAddress = "",
    id: Annotated[str, typer.Option(help="This worker's name; by default RALLYPOINT_ID, or worker-PID.")] = "",
    threads: Annotated[int, typer.Option(
        min=1, metavar="N", help="Intra-op threads: as many as the other workers have, or the bytes differ.",
    )] = 1,
) -> None:  # fmt: skip
    """Run a script as one worker of one job. On SIGTERM it hands its replicas over and ends.

    The job's token comes in RALLYPOINT_TOKEN.

    Example: [bold]rallypoint worker --coordinator 10.0.0.7:4700 train.py --my-option 3[/bold]
    """
    from rallypoint.launch.commands.by_hand import start_worker

    _refuse_option(context, str(script), "script")
    start_worker(script, context.args, coordinator=coordinator, id=id, threads=threads)


@app.command(rich_help_panel=_BY_HAND)
def aggregator(
    bind: Annotated[str, typer.Option(help="Where workers connect; port 0 is any free one.")] = "127.0.0.1:0",
    coordinator: JobAddress = "",
    id: Annotated[str, typer.Option(help="This aggregator's name; by default RALLYPOINT_ID, or aggregator-PID.")] = "",
    near: Annotated[str, typer.Option(
        metavar="PLACE", help="A host or a rack, by any name: for workers whose RALLYPOINT_NEAR is the same.",
    )] = "",
    advertise: Advertise = "",
) -> None:  # fmt: skip
    """Run one aggregator of one job: it adds up the contributions of workers near it. It may be ended at any time.

    The job's token comes in RALLYPOINT_TOKEN.

    Example: [bold]rallypoint aggregator --coordinator 10.0.0.7:4700 --bind 10.0.0.9:0 --near rack2[/bold]
    """
    from rallypoint.aggregator.service import AggregatorService
    from rallypoint.launch.commands.by_hand import address_of, end_process, run_server

    address = address_of(coordinator)
    service = AggregatorService(
        id=id or os.environ.get(environment.ID) or f"aggregator-{os.getpid()}", coordinator=address,
        token=os.environ.get(environment.TOKEN, ""), near=near or os.environ.get(environment.NEAR, ""), bind=bind,
        advertise=advertise, transport=TcpTransport(),
    )  # fmt: skip
    end_process(run_server(service, address))


def main() -> None:
    """The entry point: errors of ours are one sentence."""
    logging.basicConfig(level=os.environ.get("RALLYPOINT_LOG", "WARNING"), format="%(message)s")
    for command in app.registered_commands:
        command.help = _unwrapped(inspect.getdoc(command.callback) or "")
    try:
        app(prog_name="rallypoint")
    except RallypointError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _unwrapped(text: str) -> str:
    """The text with one line for each paragraph: a terminal's width is not that of our source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _without_settings(given: list[str]) -> tuple[list[str], list[str]]:
    """A recipe's arguments, and each `--set key=value` that stood among them: those are the job's."""
    rest: list[str] = []
    settings: list[str] = []
    arguments = iter(given)
    for argument in arguments:
        if argument == "--set":
            settings.append(next(arguments, ""))
        elif argument.startswith("--set="):
            settings.append(argument.removeprefix("--set="))
        else:
            rest.append(argument)
    return rest, settings


def _recipe_argv(recipe: str, arguments: list[str]) -> list[str]:
    from rallypoint.recipes import RECIPES

    if recipe not in RECIPES:
        raise UsageError(f"there is no recipe {recipe}: choose one of {', '.join(sorted(RECIPES))}")
    argv = [sys.executable, "-m", RECIPES[recipe], *arguments]
    if "--help" in arguments:
        os.execv(sys.executable, argv)
    return argv


def _launch(argv: list[str], options: RunOptions, *, script: str = "", settings: list[str] | None = None) -> None:
    from rallypoint.launch.console import RunConsole
    from rallypoint.launch.launcher import launch

    plan = options.run(argv, script=script, more_settings=settings)
    raise typer.Exit(launch(plan, RunConsole(), overwrite=options.overwrite))


def _refuse_option(context: typer.Context, first: str, what: str) -> None:
    """Raise UsageError if what was taken for the script or the recipe is an option that we do not have."""
    if not first.startswith("-"):
        return
    name = first.partition("=")[0]
    known = [option for parameter in context.command.params for option in parameter.opts if option.startswith("--")]
    raise UsageError(
        f"there is no option {name}{meant(name, known) or f'; `rallypoint {context.info_name} --help` lists them'} "
        f"(the {what}'s own options stand after it)"
    )


def _hint_at_misplaced(context: typer.Context, given: list[str], first: str) -> None:
    """Say which of our options stand after the script or the recipe: they are passed on to it, as everything there."""
    known = {option for parameter in context.command.params for option in parameter.opts if option.startswith("--")}
    found = list(dict.fromkeys(name for argument in given if (name := argument.partition("=")[0]) in known))
    if found:
        print(
            f"hint: {', '.join(found)} after {first} goes to {first}; if the cluster is meant: "
            f"rallypoint {context.info_name} {found[0]} ... {first}", file=sys.stderr,
        )  # fmt: skip


def _sizes(text: str) -> list[int]:
    if not all(part.strip().isdigit() for part in text.split(",") if part.strip()):
        raise ConfigError(f"'{text}' is not a list of numbers of workers: write it as 4,1,3")
    return [int(part) for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    main()
