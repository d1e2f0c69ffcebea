"""Commands that look into what a run has computed, and what has happened to it: replay, report."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rallypoint.cli.app import AFTER, app
from rallypoint.errors import UsageError
from rallypoint.launch.options import RunFolder


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
    """Compute a step of a run again, with the same bytes as then, and look at it; or say where two runs part.

    It begins with the nearest snapshot at or before the step, with the script that the run has kept, in one process and
    a temporary folder. The run's own folder is only read, and may be that of a run that goes on. The script's loop ends
    after the step, and its evaluations are left out.

    Shown are each replica's loss and samples; the first module whose output is not finite; and whether
    the contribution equals what the run has recorded (fingerprints=N: of every Nth step). Status 1: something differs.

    Example: [bold]rallypoint replay runs/20260131-235959 --step 1234 --replica 5[/bold]

    With another run nothing is computed: it says which parameter differs first, and at which step (with --step, after
    that one only). Both need the setting fingerprints=N: [bold]rallypoint replay runs/20260131-235959
    runs/20260201-101500[/bold]
    """
    if other is not None:
        if replica is not None or find_spike or current_code:
            raise UsageError("two runs are compared by what they have recorded: with --step and --json alone")
        raise typer.Exit(_compare(run, other, -1 if step is None else step, json=json))
    from rallypoint.launch.observing.replay import ReplayWanted, differs, lines_of
    from rallypoint.launch.observing.replay import replay as play

    if (step is None) != find_spike:
        raise UsageError("which step? give --step N, or --find-spike for the first whose loss stands out")
    wanted = ReplayWanted(
        step=-1 if step is None else step, replica=-1 if replica is None else replica,
        current=current_code, quiet=json,
    )  # fmt: skip
    result = play(run, wanted, lambda text: print(text, file=sys.stderr if json else sys.stdout, flush=True))
    if json:
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(lines_of(result)))
    raise typer.Exit(1 if differs(result) else 0)


def _compare(run: Path, other: Path, step: int, *, json: bool) -> int:
    """Return the exit status."""
    from rallypoint.launch.observing.replay import diff, words_of

    found = diff(run, other, step)
    print(msgspec.json.encode(found).decode() if json else words_of(found))
    return 0 if found.version < 0 else 1


@app.command(rich_help_panel=AFTER)
def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="FILE.zip|FOLDER", help="Where; by default a new file in the run's folder reports/.",
        show_default=False,
    )] = None,
) -> None:  # fmt: skip
    """Say what has happened to a run, and write a report of it for others: without tokens, keys and environments.

    It holds the newest events and views, where each thread of the run's processes on this machine is, versions,
    settings, what was printed, and what the doctor says. The run may go on, or be dead.

    Example: [bold]rallypoint report runs/20260131-235959 --out report.zip[/bold]
    """
    from rallypoint.launch.observing.reports import picture_of, place_in, write_report

    if not run.is_dir():
        raise UsageError(f"there is no folder {run}: name that of a run, as runs/20260131-235959")
    picture = picture_of(run, ask=True)
    made = write_report(picture, out or place_in(run, "report"), _examined())
    print(f"{made.sentence}\n{made.path}")


def _examined() -> str:
    """What the doctor says of this machine."""
    from rich.console import Console

    from rallypoint.launch.access import Access
    from rallypoint.launch.commands.doctor import Doctor

    text = io.StringIO()
    Doctor(Console(file=text, width=200, highlight=False, no_color=True), Access()).machine()
    return text.getvalue()
