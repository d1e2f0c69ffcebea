"""The command line: ``rallypoint run``, ``rallypoint train``, and the roles that they start."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from rallypoint.errors import ConfigError, RallypointError, UsageError
from rallypoint.launch import environment

if TYPE_CHECKING:
    from rallypoint.launch.launcher import Launch

app = typer.Typer(
    help="Data-parallel training for PyTorch: stateless workers, stateful servers.",
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip

# Options that a plan has under the same name.
_PLAIN = (
    "standby", "servers", "replication", "heartbeat", "backup_tasks", "threads", "bind", "snapshot_steps",
    "snapshot_seconds", "compression",
)  # fmt: skip
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

_SNAPSHOTS, _SETTINGS = "Snapshots", "Settings and what is written"

Workers = Annotated[str, typer.Option(
    "--workers", "-w", metavar="N[:M]", help="Worker processes, which compute gradients: 4, or 2:8 for from 2 to 8.",
)]  # fmt: skip
Standby = Annotated[
    int, typer.Option(min=0, metavar="N", help="More workers, imported and connected, to take over at once.")
]
Servers = Annotated[
    int, typer.Option("--servers", "-s", min=1, metavar="N", help="Server processes; they own the parameters.")
]
Replication = Annotated[int, typer.Option(
    min=1, max=2, metavar="1|2", help="2: every shard is on two servers, and either may die without a step lost.",
)]  # fmt: skip
Heartbeat = Annotated[
    float, typer.Option(min=0.5, metavar="S", help="Seconds without a sign of life until a process is given up.")
]
BackupTasks = Annotated[
    bool, typer.Option("--backup-tasks", help="Give a straggler's replica to an idle worker too; the first wins.")
]
SnapshotSeconds = Annotated[float, typer.Option(
    min=0, metavar="S", rich_help_panel=_SNAPSHOTS, help="Take a snapshot every so many seconds; 0: not by time.",
)]  # fmt: skip
SnapshotSteps = Annotated[int, typer.Option(
    min=0, metavar="N", rich_help_panel=_SNAPSHOTS, help="Take a snapshot every so many steps; 0: not by steps.",
)]  # fmt: skip
Snapshots = Annotated[str, typer.Option(
    metavar="URL", rich_help_panel=_SNAPSHOTS,
    help="Where: a folder or any fsspec URL; by default in the run's folder; none for no snapshots.",
)]  # fmt: skip
Compression = Annotated[
    str, typer.Option(metavar="KIND", rich_help_panel=_SNAPSHOTS, help="none, zstd or zstd-planes (smaller, slower).")
]
KeepLast = Annotated[
    int, typer.Option(min=1, metavar="N", rich_help_panel=_SNAPSHOTS, help="Snapshots to keep: the last so many,")
]
KeepEvery = Annotated[int, typer.Option(
    min=0, metavar="N", rich_help_panel=_SNAPSHOTS, help="... those of a version that is a multiple of this (0: none),",
)]  # fmt: skip
KeepBest = Annotated[str, typer.Option(
    metavar="NAME", rich_help_panel=_SNAPSHOTS, help="... and the one with the lowest value of this metric.",
)]  # fmt: skip
Threads = Annotated[
    int, typer.Option(min=1, metavar="N", help="Intra-op threads of every process (1: the same bytes every time).")
]
ConfigFile = Annotated[Path | None, typer.Option(
    "--config", metavar="FILE", rich_help_panel=_SETTINGS, help="A TOML file of settings, over the script's own.",
)]  # fmt: skip
Sets = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", rich_help_panel=_SETTINGS,
    help="One setting, as in --set steps=200; may be repeated.",
)]  # fmt: skip
Folder = Annotated[Path | None, typer.Option(
    metavar="FOLDER", rich_help_panel=_SETTINGS, help="The run's folder; by default a new one under runs/.",
)]  # fmt: skip
Trace = Annotated[Path | None, typer.Option(
    metavar="FILE", rich_help_panel=_SETTINGS, help="Write a Chrome trace (Perfetto) of a few steps to this file.",
)]  # fmt: skip
TraceSteps = Annotated[str, typer.Option(
    metavar="A:B", rich_help_panel=_SETTINGS, help="Which steps to trace, from A to before B.",
)]  # fmt: skip
Advertise = Annotated[
    str, typer.Option(metavar="HOST[:PORT]", help="The address that others connect to, where --bind is 0.0.0.0.")
]
Bind = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where the coordinator listens; port 0 is any free one.")
]
Kills = Annotated[int, typer.Option(
    min=0, metavar="N", help="SIGKILLs, spread over workers, servers and the coordinator.",
)]  # fmt: skip
Stops = Annotated[int, typer.Option(min=0, metavar="N", help="SIGSTOPs of a worker, for twice the heartbeat.")]
Resizes = Annotated[str, typer.Option(metavar="N,N,..", help="Numbers of workers to change to on the way, as 4,1,3.")]
Everything = Annotated[bool, typer.Option("--everything", help="Kill every process at once in the middle, and resume.")]
Schedule = Annotated[str, typer.Option(
    metavar="LIST", help="Your own: kill worker, stop server, resize 4, everything, ...",
)]  # fmt: skip
Seed = Annotated[int, typer.Option(metavar="N", help="Of the random schedule and its victims.")]
ReportFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report to this file too.")]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run, as runs/20260131-235959.")]


@app.command(context_settings=_PASS_ON)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your training script; everything after it is passed on to it.")],
    workers: Workers = "2", servers: Servers = 2, standby: Standby = 0, replication: Replication = 1,
    heartbeat: Heartbeat = 3.0, backup_tasks: BackupTasks = False, snapshot_seconds: SnapshotSeconds = 60.0,
    snapshot_steps: SnapshotSteps = 0, snapshots: Snapshots = "", compression: Compression = "none",
    keep_last: KeepLast = 3, keep_every: KeepEvery = 0, keep_best: KeepBest = "",
    threads: Threads = 1, config: ConfigFile = None, sets: Sets = None,
    folder: Folder = None, trace: Trace = None, trace_steps: TraceSteps = "5:7", bind: Bind = "127.0.0.1:0",
) -> None:  # fmt: skip
    """Run a script on a cluster of processes on this machine.

    Example: [bold]rallypoint run --workers 4 --servers 2 train.py --my-option 3[/bold]
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}")
    _launch([sys.executable, str(script), *context.args], context.params)


@app.command(context_settings=_PASS_ON)
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="gpt or resnet; everything after it is passed on to the recipe.")],
    workers: Workers = "2", servers: Servers = 2, standby: Standby = 0, replication: Replication = 1,
    heartbeat: Heartbeat = 3.0, backup_tasks: BackupTasks = False, snapshot_seconds: SnapshotSeconds = 60.0,
    snapshot_steps: SnapshotSteps = 0, snapshots: Snapshots = "", compression: Compression = "none",
    keep_last: KeepLast = 3, keep_every: KeepEvery = 0, keep_best: KeepBest = "",
    threads: Threads = 1, config: ConfigFile = None, sets: Sets = None,
    folder: Folder = None, trace: Trace = None, trace_steps: TraceSteps = "5:7", bind: Bind = "127.0.0.1:0",
) -> None:  # fmt: skip
    """Train a ready-made recipe on real data.

    Example: [bold]rallypoint train gpt --data my/texts --steps 500[/bold]; its own options: rallypoint train gpt --help
    """
    _launch(_recipe_argv(recipe, _without_settings(context)), context.params)


@app.command(context_settings=_PASS_ON)
def chaos(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="gpt or resnet; everything after it is passed on to it.")] = "gpt",
    kills: Kills = 10, stops: Stops = 1, resizes: Resizes = "", everything: Everything = False,
    schedule: Schedule = "", seed: Seed = 0, json: ReportFile = None,
    workers: Workers = "2", servers: Servers = 2, standby: Standby = 1, replication: Replication = 2,
    heartbeat: Heartbeat = 3.0, backup_tasks: BackupTasks = False, snapshot_seconds: SnapshotSeconds = 10.0,
    snapshot_steps: SnapshotSteps = 0, snapshots: Snapshots = "", compression: Compression = "none",
    keep_last: KeepLast = 3, keep_every: KeepEvery = 0, keep_best: KeepBest = "",
    threads: Threads = 1, config: ConfigFile = None, sets: Sets = None,
    folder: Folder = None, trace: Trace = None, trace_steps: TraceSteps = "5:7", bind: Bind = "127.0.0.1:0",
) -> None:  # fmt: skip
    """Train a recipe twice, in peace and while its processes are killed: do both end with the same bytes?

    Example: [bold]rallypoint chaos --kills 40 --resizes 4,1,3 gpt --steps 1500[/bold]
    """
    from rich.console import Console

    from rallypoint.launch.chaos import chaos as play
    from rallypoint.launch.chaos import parse_faults, random_faults

    sizes = _sizes(resizes)
    faults = parse_faults(schedule) or random_faults(kills, sizes, stops, everything, servers, seed)
    plan = _plan(_recipe_argv(recipe, _without_settings(context)), context.params)
    raise typer.Exit(play(plan, faults, seed, Console(highlight=False), json=json))


@app.command()
def resume(
    run: RunFolder,
    workers: Annotated[str, typer.Option("--workers", "-w", help="Other numbers than before, as 4 or 2:8.")] = "",
    servers: Annotated[int, typer.Option("--servers", "-s", min=0, help="Another number of servers.")] = 0,
    bind: Bind = "127.0.0.1:0",
) -> None:
    """Go on with a run from its newest usable snapshot: nothing else is needed.

    Example: [bold]rallypoint resume runs/20260131-235959[/bold]
    """
    from rallypoint.launch.console import RunConsole
    from rallypoint.launch.launcher import launch, parse_workers, read_plan
    from rallypoint.store.snapshots import SnapshotStore

    plan = read_plan(run)
    if not plan.snapshots:
        raise UsageError(f"{run} was started with --snapshots none: there is nothing to go on from")
    manifest = SnapshotStore(plan.snapshots).latest_usable(lambda text: print(text, file=sys.stderr))
    if manifest is None:
        raise UsageError(f"{run} has no usable snapshot in {plan.snapshots}: start it anew")
    print(f"going on from {manifest.id}, version {manifest.version}")
    plan = msgspec.structs.replace(plan, resume=manifest.id, bind=bind, folder=str(run))
    if workers:
        limits, start = parse_workers(workers)
        plan = msgspec.structs.replace(plan, workers=limits, workers_start=start)
    if servers:
        plan = msgspec.structs.replace(plan, servers=servers, replication=min(plan.replication, servers))
    raise typer.Exit(launch(plan, RunConsole()))


@app.command()
def snapshot(run: RunFolder) -> None:
    """Ask a running job for a snapshot now, and wait until it is durable."""
    from rallypoint.launch.ask import take_snapshot

    print(take_snapshot(run))


@app.command()
def export(
    snapshot: Annotated[str, typer.Argument(help="A snapshot, a folder of snapshots, or a run's folder.")],
    to: Annotated[Path, typer.Option(help="model.safetensors, or model.pt with the optimizer's state by name.")],
) -> None:
    """Write a snapshot's model as safetensors or as a torch checkpoint.

    Example: [bold]rallypoint export runs/20260131-235959 --to model.safetensors[/bold]
    """
    from rallypoint.store.export import export_snapshot

    print(export_snapshot(snapshot, to))


@app.command(hidden=True)
def coordinator(
    terms: Annotated[str, typer.Option(help="How the cluster is to behave (core.terms.Terms), as JSON.")] = "{}",
    join_info: Annotated[str, typer.Option(help="What members are told (JoinInfo), as JSON.")] = "{}",
    resume: Annotated[str, typer.Option(help="The snapshot to begin with.")] = "",
    bind: Bind = "127.0.0.1:0", advertise: Advertise = "",
) -> None:
    """Run the coordinator of one job. The token comes in RALLYPOINT_TOKEN."""
    from rallypoint.coordinator.service import CoordinatorService, JoinInfo
    from rallypoint.core.cluster.terms import Terms
    from rallypoint.launch.lifeline import hold_lifeline
    from rallypoint.store.snapshots import SnapshotStore

    hold_lifeline()
    about = msgspec.json.decode(join_info, type=JoinInfo)
    start = None
    if resume:
        manifest = SnapshotStore(about.snapshots).load(resume)
        start = (manifest.job, manifest.id, manifest.version)
    service = CoordinatorService(
        terms=msgspec.json.decode(terms, type=Terms), bind=bind, advertise=advertise, join_info=about,
        resume=start, token=os.environ.get(environment.TOKEN, ""),
    )  # fmt: skip
    service.start()
    _announce(service.address)
    failure = service.wait()
    service.close()
    raise typer.Exit(0 if failure is None else 3)


@app.command(hidden=True)
def server(
    bind: Annotated[str, typer.Option(help="Where workers connect; port 0 is any free one.")] = "127.0.0.1:0",
    coordinator: Annotated[str, typer.Option(help="host:port; by default RALLYPOINT_COORDINATOR.")] = "",
    id: Annotated[str, typer.Option(help="This server's id; by default RALLYPOINT_ID.")] = "",
    advertise: Advertise = "",
) -> None:
    """Run one reduction server of one job. The token comes in RALLYPOINT_TOKEN."""
    from rallypoint.launch.lifeline import hold_lifeline
    from rallypoint.server.service import ServerService, run_servers

    hold_lifeline()
    address = coordinator or os.environ.get(environment.COORDINATOR, "")
    if not address:
        raise UsageError("which job? give --coordinator host:port or set RALLYPOINT_COORDINATOR")
    name = id or os.environ.get(environment.ID) or f"server-{os.getpid()}"
    token = os.environ.get(environment.TOKEN, "")
    failure = run_servers([ServerService(id=name, coordinator=address, token=token, bind=bind, advertise=advertise)])
    raise typer.Exit(0 if failure is None else 3)


def main() -> None:
    """The entry point: errors of ours are one sentence."""
    logging.basicConfig(level=os.environ.get("RALLYPOINT_LOG", "WARNING"), format="%(message)s")
    try:
        app()
    except RallypointError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _without_settings(context: typer.Context) -> list[str]:
    """What a recipe is given: without each `--set key=value` among it, which is the job's wherever it stands."""
    rest: list[str] = []
    own: list[str] = list(context.params["sets"] or [])
    arguments = iter(context.args)
    for argument in arguments:
        if argument == "--set":
            own.append(next(arguments, ""))
        elif argument.startswith("--set="):
            own.append(argument.removeprefix("--set="))
        else:
            rest.append(argument)
    context.params["sets"] = own
    return rest


def _recipe_argv(recipe: str, arguments: list[str]) -> list[str]:
    from rallypoint.recipes import RECIPES

    if recipe not in RECIPES:
        raise UsageError(f"there is no recipe {recipe}: choose one of {', '.join(sorted(RECIPES))}")
    argv = [sys.executable, "-m", RECIPES[recipe], *arguments]
    if "--help" in arguments:
        os.execv(sys.executable, argv)
    return argv


def _launch(argv: list[str], options: dict[str, Any]) -> None:
    from rallypoint.launch.console import RunConsole
    from rallypoint.launch.launcher import launch

    raise typer.Exit(launch(_plan(argv, options), RunConsole()))


def _plan(argv: list[str], options: dict[str, Any]) -> Launch:
    """The plan that these options of the command line make."""
    from rallypoint.config import overrides_from
    from rallypoint.launch.launcher import SNAPSHOTS, Launch, new_folder, parse_workers
    from rallypoint.store.retention import Retention

    limits, start = parse_workers(options["workers"])
    folder = options["folder"] or new_folder(Path("runs"))
    where = options["snapshots"] or str((folder / SNAPSHOTS).resolve())
    if options["compression"] not in ("zstd", "zstd-planes", "none"):
        raise ConfigError(f"'{options['compression']}' is no compression: choose zstd, zstd-planes or none")
    if options["replication"] > options["servers"]:
        raise ConfigError("--replication 2 needs at least two servers: add --servers 2")
    return Launch(
        worker=tuple(argv), workers=limits, workers_start=start, folder=str(folder),
        snapshots="" if where == "none" else where, overrides=overrides_from(options["config"], options["sets"] or []),
        retention=Retention(
            keep_last=options["keep_last"], keep_every=options["keep_every"], keep_best=options["keep_best"]
        ),
        trace=str(options["trace"] or ""), trace_steps=_steps(options["trace_steps"]),
        **{name: options[name] for name in _PLAIN},
    )  # fmt: skip


def _sizes(text: str) -> list[int]:
    if not all(part.strip().isdigit() for part in text.split(",") if part.strip()):
        raise ConfigError(f"'{text}' is not a list of numbers of workers: write it as 4,1,3")
    return [int(part) for part in text.split(",") if part.strip()]


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit()):
        raise ConfigError(f"'{text}' is not a range of steps: write it as 5:7")
    return int(first), int(last)


def _announce(address: str) -> None:
    """Tell whoever started us where we listen: through the pipe it gave, else on the console."""
    fd = os.environ.pop(environment.ANNOUNCE, "")
    if fd.isdigit():
        with open(int(fd), "w") as pipe:
            pipe.write(f"{address}\n")
    else:
        print(f"the coordinator listens at {address}", flush=True)


if __name__ == "__main__":
    main()
