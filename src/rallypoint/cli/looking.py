"""Commands that look into what a run has computed: replay, diff."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rallypoint.cli.app import AFTER, app
from rallypoint.errors import UsageError
from rallypoint.launch.options import RunFolder

_Json = Annotated[bool, typer.Option("--json", help="As JSON, on the standard output.")]


@app.command(rich_help_panel=AFTER)
def replay(
    run: RunFolder,
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
    json: _Json = False,
) -> None:  # fmt: skip
    """Compute a step of a run again, on this machine, and look at it: the same bytes as then.

    It begins with the nearest snapshot at or before the step, with the script that the run has kept, in one process and
    a temporary folder. The run's own folder is only read, and may be that of a run that goes on. The script's loop ends
    after the step, and its evaluations are left out.

    Shown are each replica's loss and samples; the first module whose output is not finite; and whether
    the contribution equals what the run has recorded (fingerprints=N: of every Nth step). Status 1: something differs.

    Example: [bold]rallypoint replay runs/20260131-235959 --step 1234 --replica 5[/bold]
    """
    from rallypoint.launch.observing.replay import Wanted, differs, lines_of
    from rallypoint.launch.observing.replay import replay as play

    if (step is None) != find_spike:
        raise UsageError("which step? give --step N, or --find-spike for the first whose loss stands out")
    wanted = Wanted(
        step=-1 if step is None else step, replica=-1 if replica is None else replica,
        current=current_code, quiet=json,
    )  # fmt: skip
    result = play(run, wanted, lambda text: print(text, file=sys.stderr if json else sys.stdout, flush=True))
    if json:
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(lines_of(result)))
    raise typer.Exit(1 if differs(result) else 0)


@app.command(rich_help_panel=AFTER)
def diff(
    run: RunFolder,
    other: Annotated[Path, typer.Argument(help="The folder of another run of the same model.")],
    step: Annotated[int | None, typer.Option(
        "--step", min=0, metavar="N", help="Compare after this step only.",
    )] = None,
    json: _Json = False,
) -> None:  # fmt: skip
    """Say which parameter of two runs differs first, and at which step. Status 1: some do.

    Both need the setting fingerprints=N: digests of every parameter are then recorded at versions N, 2N, and so on.

    Example: [bold]rallypoint diff runs/20260131-235959 runs/20260201-101500[/bold]
    """
    from rallypoint.launch.observing.replay import diff as compare
    from rallypoint.launch.observing.replay import words_of

    found = compare(run, other, -1 if step is None else step)
    print(msgspec.json.encode(found).decode() if json else words_of(found))
    raise typer.Exit(0 if found.version < 0 else 1)
