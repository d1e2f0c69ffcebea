"""``rallypoint report``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.app import AFTER, app
from rallypoint.errors import UsageError
from rallypoint.launch.options import RunFolder


@app.command(rich_help_panel=AFTER)
def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="FILE.zip|FOLDER", help="Where; by default a new file in the run's folder reports/.",
        show_default=False,
    )] = None,
    doctor: Annotated[bool, typer.Option(
        "--doctor/--no-doctor", help="Examine this machine too; it imports torch, which takes seconds.",
    )] = True,
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
    made = write_report(picture, out or place_in(run, "report"), _examined() if doctor else "")
    print(f"{made.sentence}\n{made.path}")


def _examined() -> str:
    """What the doctor says of this machine."""
    from rich.console import Console

    from rallypoint.launch.access import Access
    from rallypoint.launch.commands.doctor import Doctor

    text = io.StringIO()
    Doctor(Console(file=text, width=200, highlight=False, no_color=True), Access()).machine()
    return text.getvalue()
