"""The command line: ``rallypoint run``, ``rallypoint train``, and the roles that they start."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rallypoint.errors import ConfigError, RallypointError, UsageError
from rallypoint.launch import environment

app = typer.Typer(
    help="Data-parallel training for PyTorch: stateless workers, stateful servers.",
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

Workers = Annotated[int, typer.Option("--workers", "-w", min=1, help="Worker processes; they compute gradients.")]
Servers = Annotated[int, typer.Option("--servers", "-s", min=1, help="Server processes; they own the parameters.")]
Threads = Annotated[int, typer.Option(min=1, help="Intra-op threads of every process (1: the same bytes every time).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings, over the script's own.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="One setting, as in --set steps=200; may be repeated.")]
Folder = Annotated[Path | None, typer.Option(help="The run's folder; by default a new one under runs/.")]
Trace = Annotated[Path | None, typer.Option(help="Write a Chrome trace (Perfetto) of a few steps to this file.")]
TraceSteps = Annotated[str, typer.Option(help="Which steps to trace, as FIRST:LAST (LAST not included).")]
Bind = Annotated[str, typer.Option(help="Where the coordinator listens; port 0 is any free one.")]


@app.command(context_settings=_PASS_ON)
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your training script; everything after it is passed on to it.")],
    workers: Workers = 2, servers: Servers = 2, threads: Threads = 1, config: ConfigFile = None, sets: Sets = None,
    folder: Folder = None, trace: Trace = None, trace_steps: TraceSteps = "5:7", bind: Bind = "127.0.0.1:0",
) -> None:  # fmt: skip
    """Run a script on a cluster of processes on this machine.

    Example: [bold]rallypoint run --workers 4 --servers 2 train.py --my-option 3[/bold]
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}")
    argv = [sys.executable, str(script), *context.args]
    _launch(argv, workers, servers, threads, config, sets, folder, trace, trace_steps, bind)


@app.command(context_settings=_PASS_ON)
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="gpt or resnet; everything after it is passed on to the recipe.")],
    workers: Workers = 2, servers: Servers = 2, threads: Threads = 1, config: ConfigFile = None, sets: Sets = None,
    folder: Folder = None, trace: Trace = None, trace_steps: TraceSteps = "5:7", bind: Bind = "127.0.0.1:0",
) -> None:  # fmt: skip
    """Train a ready-made recipe on real data.

    Example: [bold]rallypoint train gpt --data my/texts --steps 500[/bold]; its own options: rallypoint train gpt --help
    """
    from rallypoint.recipes import RECIPES

    if recipe not in RECIPES:
        raise UsageError(f"there is no recipe {recipe}: choose one of {', '.join(sorted(RECIPES))}")
    argv = [sys.executable, "-m", RECIPES[recipe], *context.args]
    if "--help" in context.args:
        os.execv(sys.executable, argv)
    _launch(argv, workers, servers, threads, config, sets, folder, trace, trace_steps, bind)


@app.command(hidden=True)
def coordinator(
    workers: Workers, servers: Servers, bind: Bind = "127.0.0.1:0",
    folder: Annotated[str, typer.Option(help="The run's folder.")] = "",
    overrides: Annotated[str, typer.Option(help="Settings over the script's own, as JSON.")] = "{}",
    trace_steps: TraceSteps = "0:0",
) -> None:  # fmt: skip
    """Run the coordinator of one job. The token comes in RALLYPOINT_TOKEN."""
    from rallypoint.coordinator.service import CoordinatorService, Reception
    from rallypoint.launch.lifeline import hold_lifeline

    hold_lifeline()
    reception = Reception(msgspec.json.decode(overrides, type=dict[str, Any]), folder, _steps(trace_steps))
    service = CoordinatorService(
        workers=workers, servers=servers, bind=bind, reception=reception, token=os.environ.get(environment.TOKEN, "")
    )
    service.start()
    _announce(service.address)
    service.wait()
    service.close()


@app.command(hidden=True)
def server(
    bind: Annotated[str, typer.Option(help="Where workers connect; port 0 is any free one.")] = "127.0.0.1:0",
    coordinator: Annotated[str, typer.Option(help="host:port; by default RALLYPOINT_COORDINATOR.")] = "",
    id: Annotated[str, typer.Option(help="This server's id; by default RALLYPOINT_ID.")] = "",
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
    failure = run_servers([ServerService(id=name, coordinator=address, token=token, bind=bind)])
    raise typer.Exit(0 if failure is None else 3)


def main() -> None:
    """The entry point: errors of ours are one sentence."""
    logging.basicConfig(level=os.environ.get("RALLYPOINT_LOG", "WARNING"), format="%(message)s")
    try:
        app()
    except RallypointError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _launch(
    argv: list[str], workers: int, servers: int, threads: int, config: Path | None, sets: list[str] | None,
    folder: Path | None, trace: Path | None, trace_steps: str, bind: str,
) -> None:  # fmt: skip
    from rallypoint.config import overrides_from
    from rallypoint.launch.console import RunConsole
    from rallypoint.launch.launcher import Launch, launch, new_folder

    plan = Launch(
        worker=argv, workers=workers, servers=servers, threads=threads, bind=bind,
        folder=folder or new_folder(Path("runs")), overrides=overrides_from(config, sets or []),
        trace=trace, trace_steps=_steps(trace_steps),
    )  # fmt: skip
    raise typer.Exit(launch(plan, RunConsole()))


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
