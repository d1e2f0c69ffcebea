"""``rallypoint track``."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated

import typer

from rallypoint.cli.app import RUNNING, app
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.launch.observing.beside import facts_of
from rallypoint.launch.options import RunFolder

_NICE = 10  # so much behind the run's own processes, where processors are short


@app.command(rich_help_panel=RUNNING)
def track(
    run: RunFolder,
    track: Annotated[str, typer.Option(
        "--track", metavar="KIND:FOLDER", help="The tracker: tensorboard, wandb (offline) or mlflow, and its folder.",
    )],
) -> None:  # fmt: skip
    """Write a run's figures for a tracker, while the run goes on or afterwards.

    It ends when the run does. Called again it goes on where it ended: no step is written twice. `rallypoint run` does
    it by itself, with the same option.

    Example: [bold]rallypoint track runs/20260131-235959 --track tensorboard:logs[/bold]
    """
    from rallypoint.launch.observing.redaction import Redaction, secrets_among
    from rallypoint.launch.observing.reports import is_running
    from rallypoint.watch.tracking import RunFacts, open_tracker, parse_target, place_of
    from rallypoint.watch.tracking import track as follow

    target, closing, beside = parse_target(track), threading.Event(), hold_lifeline()
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
        steps = follow(run, facts, open_tracker(target), place, closing, lambda: beside or is_running(run))
    except RallypointError:
        raise
    except Exception as error:
        raise UsageError(
            f"the files of {kind} in {to} cannot be written ({type(error).__name__}: {error}); the run is not "
            f"touched: `rallypoint track {run} --track {target}` writes what is missing"
        ) from None
    if not beside:
        print(f"{steps} steps are in {to}")
