"""Commands for a run that goes on, or has ended: watch it, replay it, report it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rallypoint.cli.app import AFTER, RUNNING, app
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.launch.observing.beside import facts_of, resolved_of
from rallypoint.launch.options import RunFolder
from rallypoint.watch.follow import EVENTS

_NICE = 10  # so much behind the run's own processes, where processors are short


@app.command(rich_help_panel=RUNNING)
def watch(
    runs: Annotated[list[Path], typer.Argument(
        metavar="RUN", help="The folder of a run, as runs/20260131-235959; of several, to compare them.",
    )],
    terminal: Annotated[bool, typer.Option("--terminal", help="Show it here, and not as a page.")] = False,
    track: Annotated[str, typer.Option(
        "--track", metavar="KIND:FOLDER", show_default=False,
        help="Write its figures for a tracker: tensorboard, wandb (offline) or mlflow; missing steps are added.",
    )] = "",
    port: Annotated[int, typer.Option(
        "--port", min=0, max=65535, help="The page's port on this machine; by default any free one.",
        show_default=False,
    )] = 0,
) -> None:  # fmt: skip
    """Show a run, or several in one chart, during the run or afterwards, as a page in the browser.

    The page is served on this machine alone, and needs the printed address. From elsewhere: ssh -L PORT:127.0.0.1:PORT.
    Ctrl-C ends the page, not the run. With several runs the settings that differ are shown too.

    Example: [bold]rallypoint watch runs/20260131-235959[/bold]
    """
    if track and len(runs) > 1:
        raise UsageError("--track is for one run: name one folder")
    runs = _begun(runs)
    if track:
        _track(runs[0], track)
    elif terminal:
        from rich.console import Console

        from rallypoint.watch.top import top

        folders = _named(runs)
        with contextlib.suppress(KeyboardInterrupt):
            top(folders, _settings(folders) if len(folders) > 1 else {}, Console(highlight=False))
    else:
        _serve(_named(runs), port)


def _serve(folders: dict[str, Path], port: int) -> None:
    from rallypoint.launch.observing.beside import check_page

    check_page()
    from rallypoint.watch.app import compared, served

    if hold_lifeline():  # of a run that serves its own page
        os.nice(_NICE)
    if len(folders) > 1:
        page = compared(folders, _settings(folders), port)
    else:
        (run,) = folders.values()
        page = served(run, facts_of(run), port, functools.partial(resolved_of, run))
    with page as (address, server):
        print(f"the page of {', '.join(map(str, folders.values()))}: {address}", flush=True)
        server.answer()


def _begun(runs: list[Path]) -> list[Path]:
    """Those that have a log, if any has one: ``runs/*`` names other folders too."""
    begun = [run for run in runs if os.path.isfile(run / EVENTS)] or runs  # (Path.is_file raises for some)
    if left_out := [str(run) for run in runs if run not in begun]:
        print(f"left out, without {EVENTS}: {', '.join(left_out)}", file=sys.stderr)
    return begun


def _named(runs: list[Path]) -> dict[str, Path]:
    """The runs by the names that are shown. Raises UsageError if one is there twice."""
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    folders = dict(zip(names, runs, strict=True))
    if len(folders) < len(runs):
        raise UsageError("the same run is named twice")
    return folders


def _settings(folders: dict[str, Path]) -> dict[str, dict[str, str]]:
    own = {"snapshots": ""}  # each run has a place of its own
    return {name: {**facts_of(run)["settings"], **resolved_of(run), **own} for name, run in folders.items()}


def _track(run: Path, target: str) -> None:
    from rallypoint.launch.observing.redaction import Redaction, secrets_among
    from rallypoint.own_files import is_running
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


@app.command(rich_help_panel=AFTER)
def replay(
    run: RunFolder,
    other: Annotated[Path | None, typer.Argument(
        help="Another run of the same model: compare what both have recorded.", show_default=False,
    )] = None,
    step: Annotated[int | None, typer.Option(
        "--step", min=0, metavar="N", help="The step to look at: 0 is the first.",
    )] = None,
    replica: Annotated[int | None, typer.Option(
        "--replica", min=0, metavar="N", help="Look at this replica only.",
    )] = None,
    find_spike: Annotated[bool, typer.Option(
        "--find-spike", help="Find the first step whose recorded loss stands out, and the replica with its samples.",
    )] = False,
    current_code: Annotated[bool, typer.Option(
        "--current-code", help="Run the script as it is now, not the copy that the run has kept.",
    )] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON, on the standard output.")] = False,
) -> None:  # fmt: skip
    """Compute a step of a run again, with the same bytes as then, and look at it; or say where two runs differ first.

    It begins with the nearest snapshot at or before the step, with the script that the run has kept, in one process and
    a temporary folder. The run's own folder is only read, and the run may still be running. The script's loop ends
    after the step, and its evaluations are left out.

    It shows each replica's loss and samples, the first module whose output is not finite, and whether the contribution
    equals the record (audit.fingerprints=N records every Nth step). Status 1: something differs.

    Example: [bold]rallypoint replay runs/20260131-235959 --step 1234 --replica 5[/bold]

    With another run nothing is computed: it says which parameter differs first, and at which step (with --step, after
    that one only). Both need the setting audit.fingerprints=N: [bold]rallypoint replay runs/20260131-235959
    runs/20260201-101500[/bold]
    """
    if other is not None:
        if replica is not None or find_spike or current_code:
            raise UsageError("two runs are compared by what they have recorded: with --step and --json alone")
        from rallypoint.launch.observing.replay import diff, words_of

        found = diff(run, other, -1 if step is None else step)
        print(msgspec.json.encode(found).decode() if json else words_of(found))
        raise typer.Exit(0 if found.version < 0 else 1)
    from rallypoint.launch.observing.replay import differs, lines_of
    from rallypoint.launch.observing.replay import replay as play

    if (step is None) != find_spike:
        raise UsageError("which step? give --step N, or --find-spike for the first whose loss stands out")
    result = play(
        run, lambda text: print(text, file=sys.stderr if json else sys.stdout, flush=True),
        step=-1 if step is None else step, replica=-1 if replica is None else replica,
        current=current_code, quiet=json,
    )  # fmt: skip
    if json:
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(lines_of(result)))
    raise typer.Exit(1 if differs(result) else 0)


@app.command(rich_help_panel=AFTER)
def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="FILE.zip|FOLDER", help="Where; by default a new file in the run's folder reports/.",
        show_default=False,
    )] = None,
) -> None:  # fmt: skip
    """Say what has happened to a run, and write a report of it for others: without tokens, keys and environments.

    It holds the newest events and views, the stacks of the run's processes on this machine, versions, settings, the
    last lines printed, and the answer of `rallypoint doctor`. The run may be running or dead.

    Example: [bold]rallypoint report runs/20260131-235959 --out report.zip[/bold]
    """
    from rich.console import Console

    from rallypoint.launch.access import Access
    from rallypoint.launch.commands.doctor import Doctor
    from rallypoint.launch.observing.reports import picture_of, place_in, write_report

    if not run.is_dir():
        raise UsageError(f"there is no folder {run}: name that of a run, as runs/20260131-235959")
    picture = picture_of(run, ask=True)
    text = io.StringIO()
    Doctor(Console(file=text, width=200, highlight=False, no_color=True), Access()).machine()
    made = write_report(picture, out or place_in(run, "report"), text.getvalue())
    print(f"{made.sentence}\n{made.path}")
