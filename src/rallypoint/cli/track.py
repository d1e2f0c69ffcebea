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
from rallypoint.launch.observing.facts import facts_of
from rallypoint.launch.options import RunFolder

_NICE = 10  # so much behind the run's own processes, where processors are short


@app.command(rich_help_panel=RUNNING)
def track(
    run: RunFolder,
    tensorboard: Annotated[str | None, typer.Option(
        "--tensorboard", metavar="FOLDER", help="Where TensorBoard looks: tensorboard --logdir FOLDER.",
    )] = None,
    track: Annotated[str | None, typer.Option(
        "--track", metavar="KIND:FOLDER", help="The tracker: tensorboard, wandb (offline) or mlflow, and its folder.",
    )] = None,
) -> None:  # fmt: skip
    """Write a run's figures and events for a tracker, while the run goes on or afterwards.

    It ends when the run does. Called again it goes on where it ended: no step is written twice. `rallypoint run` does
    it by itself, with the same options.

    Example: [bold]rallypoint track runs/20260131-235959 --tensorboard logs[/bold]
    """
    from rallypoint.launch.reporting.picture import is_running
    from rallypoint.launch.reporting.redaction import Redaction, secrets_among
    from rallypoint.watch.tracking.follow import place_of
    from rallypoint.watch.tracking.follow import track as follow
    from rallypoint.watch.tracking.kinds import open_tracker, targets_of
    from rallypoint.watch.tracking.tracker import RunFacts

    targets = targets_of([track] if track else None, tensorboard)
    if len(targets) != 1:
        raise UsageError("name one tracker: --tensorboard FOLDER or --track KIND:FOLDER")
    (target,), closing, beside = targets, threading.Event(), hold_lifeline()
    kind, _, to = target.partition(":")
    if beside:
        os.nice(_NICE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: closing.set())
    known = facts_of(run)
    redact = Redaction(secrets_among(os.environ))
    settings = {name: redact(value) for name, value in known["settings"].items() if name != "command"}
    place = place_of(run, kind, to)
    try:
        tracker = open_tracker(target, redact)
        steps = follow(
            run, RunFacts(known["name"], settings), tracker, place, closing, lambda: beside or is_running(run)
        )
        tracker.close()
    except RallypointError:
        raise
    except Exception as error:
        raise UsageError(
            f"the files of {kind} in {to} cannot be written ({type(error).__name__}: {error}); the run is not "
            f"touched: `rallypoint track {run} --track {target}` writes what is missing"
        ) from None
    if not beside:
        print(f"{steps} steps are in {to}")
