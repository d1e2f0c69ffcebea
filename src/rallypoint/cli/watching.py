"""``rallypoint watch``: a run, or several, on a page, in the terminal, or for a tracker."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.app import RUNNING, app
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.launch.observing.beside import facts_of, follow, resolved_of

_NICE = 10  # so much behind the run's own processes, where processors are short


@app.command(rich_help_panel=RUNNING)
def watch(
    runs: Annotated[list[Path], typer.Argument(
        metavar="RUN", help="The folder of a run, as runs/20260131-235959; of several, to compare them.",
    )],
    terminal: Annotated[bool, typer.Option("--terminal", help="Show it here, and not as a page.")] = False,
    track: Annotated[str, typer.Option(
        "--track", metavar="KIND:FOLDER", show_default=False,
        help="Write its figures for a tracker: tensorboard, wandb (offline) or mlflow; it goes on where it ended.",
    )] = "",
    port: Annotated[int, typer.Option(
        "--port", min=0, max=65535, help="The page's port on this machine; by default any free one.",
        show_default=False,
    )] = 0,
    buttons: Annotated[bool, typer.Option(
        "--buttons", help="With buttons (pause, stop, resize, ...) for who has the token that is printed then.",
    )] = False,
) -> None:  # fmt: skip
    """Show a run, or several over each other, while they go on or afterwards, as a page in the browser.

    It is served on this machine alone, to who has the printed address. From elsewhere: ssh -L PORT:127.0.0.1:PORT.
    Ctrl-C ends the page, not the run. With several runs the settings that differ are shown too.

    Example: [bold]rallypoint watch runs/20260131-235959[/bold]
    """
    for name, given in (("--terminal", terminal), ("--track", track), ("--buttons", buttons)):
        if given and len(runs) > 1:
            raise UsageError(f"{name} is for one run: name one folder")
    if track:
        _track(runs[0], track)
    elif terminal:
        _show(runs[0])
    elif len(runs) > 1:
        _compare(runs, port)
    else:
        _serve(runs[0], port, buttons=buttons)


def _serve(run: Path, port: int, *, buttons: bool) -> None:
    from rallypoint.launch.observing.beside import check_page

    check_page()
    from rallypoint.watch.app import Operator, served

    if hold_lifeline():  # of a run that serves its own page
        os.nice(_NICE)

    operator = Operator(secrets.token_urlsafe(16), functools.partial(follow, run)) if buttons else None
    if operator is not None:
        print(f"the operator's token, for its buttons: {operator.token}", flush=True)
    with served(run, facts_of(run), port, operator, functools.partial(resolved_of, run)) as (address, server):
        print(f"the page of {run}: {address}", flush=True)
        server.run()


def _compare(runs: list[Path], port: int) -> None:
    from rallypoint.launch.observing.beside import check_page

    check_page()
    from rallypoint.watch.app import compared

    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    folders = dict(zip(names, runs, strict=True))
    if len(folders) < len(runs):
        raise UsageError("the same run is named twice")

    settings = {name: facts_of(run)["settings"] for name, run in folders.items()}
    with compared(folders, settings, port) as (address, server):
        print(f"the page of {', '.join(folders)}: {address}", flush=True)
        server.run()


def _show(run: Path) -> None:
    from rich.console import Console

    from rallypoint.watch.top import top

    with contextlib.suppress(KeyboardInterrupt):
        top(run, Console(highlight=False))


def _track(run: Path, target: str) -> None:
    from rallypoint.launch.observing.redaction import Redaction, secrets_among
    from rallypoint.launch.observing.reports import is_running
    from rallypoint.watch.tracking import RunFacts, open_tracker, parse_target, place_of, track

    target, closing, beside = parse_target(target), threading.Event(), hold_lifeline()
    kind, _, to = target.partition(":")
    if beside:
        os.nice(_NICE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: closing.set())
    known = facts_of(run)
    redact = Redaction(secrets_among(os.environ))
    settings = {name: redact(value) for name, value in known["settings"].items() if name != "command"}
    place, facts = place_of(run, target), RunFacts(known["name"], settings)
    try:
        steps = track(run, facts, open_tracker(target), place, closing, lambda: beside or is_running(run))
    except RallypointError:
        raise
    except Exception as error:
        raise UsageError(
            f"the files of {kind} in {to} cannot be written ({type(error).__name__}: {error}); the run is not "
            f"touched: `rallypoint watch {run} --track {target}` writes what is missing"
        ) from None
    if not beside:
        print(f"{steps} steps are in {to}")
