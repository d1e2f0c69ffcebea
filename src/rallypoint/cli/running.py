"""Commands for a job that runs, or has run: resize, snapshot, export."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.app import AFTER, RUNNING, app
from rallypoint.errors import UsageError, to_install
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.launch.observing.beside import facts_of, follow, resolved_of
from rallypoint.launch.options import RunFolder
from rallypoint.store.snapshots import Format

_NICE = 10  # so much behind the run's own processes, where processors are short


@app.command(rich_help_panel=RUNNING)
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
    from rallypoint.launch.commands.ask import resize as order

    if not workers and not servers:
        raise UsageError("to what size? give --workers N, --servers N or both")
    print(order(run, workers, servers, lambda text: print(text, flush=True)))


@app.command(rich_help_panel=RUNNING)
def snapshot(run: RunFolder) -> None:
    """Ask a running job for a snapshot now, and wait until it is durable."""
    from rallypoint.launch.commands.ask import take_snapshot

    print(take_snapshot(run, print))


@app.command(rich_help_panel=RUNNING)
def watch(
    run: RunFolder,
    port: Annotated[int, typer.Option(
        "--port", min=0, max=65535, help="Its port on this machine; by default any free one.", show_default=False,
    )] = 0,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in the browser.")] = False,
    buttons: Annotated[bool, typer.Option(
        "--buttons", help="With buttons (pause, stop, resize, ...) for who has the token that is printed then.",
    )] = False,
) -> None:  # fmt: skip
    """Show a run, while it goes on or afterwards, as a page in the browser; Ctrl-C ends the page, not the run.

    It is served on this machine alone, to who has the printed address. From elsewhere: ssh -L PORT:127.0.0.1:PORT.

    Example: [bold]rallypoint watch runs/20260131-235959 --browser[/bold]
    """
    try:
        from rallypoint.watch.app import Operator, served
    except ModuleNotFoundError as error:
        raise UsageError(f"the page needs {error.name}: {to_install('watch')}") from None

    if hold_lifeline():  # of a run that serves its own page
        os.nice(_NICE)

    operator = Operator(secrets.token_urlsafe(16), functools.partial(follow, run)) if buttons else None
    if operator is not None:
        print(f"the operator's token, for its buttons: {operator.token}", flush=True)
    with served(run, facts_of(run), port, operator, functools.partial(resolved_of, run)) as (address, server):
        _opened(str(run), address, browser=browser)
        server.run()


@app.command(rich_help_panel=RUNNING)
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="The folders of two or more runs.")],
    port: Annotated[int, typer.Option(
        "--port", min=0, max=65535, help="Its port on this machine; by default any free one.", show_default=False,
    )] = 0,
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in the browser.")] = False,
) -> None:  # fmt: skip
    """Lay the curves of runs over each other, as a page in the browser, with the settings that differ.

    Example: [bold]rallypoint compare runs/20260131-235959 runs/20260201-120000 --browser[/bold]
    """
    if len(runs) < 2:
        raise UsageError("compare with which run? name two folders")
    try:
        from rallypoint.watch.app import compared
    except ModuleNotFoundError as error:
        raise UsageError(f"the page needs {error.name}: {to_install('watch')}") from None

    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    folders = dict(zip(names, runs, strict=True))
    if len(folders) < len(runs):
        raise UsageError("the same run is named twice")

    settings = {name: facts_of(run)["settings"] for name, run in folders.items()}
    with compared(folders, settings, port) as (address, server):
        _opened(", ".join(folders), address, browser=browser)
        server.run()


def _opened(what: str, address: str, *, browser: bool) -> None:
    print(f"the page of {what}: {address}", flush=True)
    if browser:
        webbrowser.open(address)


@app.command(rich_help_panel=RUNNING)
def top(
    run: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Print it as it is now, and end.")] = False,
) -> None:
    """Show a run in the terminal, while it goes on or afterwards; Ctrl-C ends the view, not the run.

    Example: [bold]rallypoint top runs/20260131-235959[/bold]
    """
    from rich.console import Console

    from rallypoint.watch.top import top as show

    with contextlib.suppress(KeyboardInterrupt):
        show(run, Console(highlight=False), once=once)


@app.command(rich_help_panel=AFTER)
def export(
    snapshot: Annotated[str, typer.Argument(help="A snapshot, a folder of snapshots, or a run's folder.")],
    to: Annotated[Path, typer.Option(help="model.safetensors, or model.pt with the optimizer's state by name.")],
    format: Annotated[Format | None, typer.Option(
        "--format", help="safetensors, pt, hf (model.safetensors in a folder), dcp (with the optimizer's state); by "
        "default what the ending says.", show_default=False,
    )] = None,
    average: Annotated[bool, typer.Option(
        "--average", "--ema", help="The average of the parameters (average=rp.EMA(...)), not the newest ones.",
    )] = False,
    best: Annotated[bool, typer.Option(
        "--best", help="The snapshot with the best figure (keep_best), not the newest one.",
    )] = False,
) -> None:  # fmt: skip
    """Write a snapshot's model as safetensors, as a Hugging Face folder or as a torch checkpoint.

    Example: [bold]rallypoint export runs/20260131-235959 --to model.safetensors[/bold]
    """
    from rallypoint.store.export import export_snapshot

    print(export_snapshot(snapshot, to, average=average, best=best, format=format))
