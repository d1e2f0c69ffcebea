"""Commands for a job that runs, or has run: resize, snapshot, pause, stop, drain, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.app import AFTER, RUNNING, app
from rallypoint.errors import UsageError
from rallypoint.launch.options import RunFolder
from rallypoint.store.snapshots import Format


@app.command(rich_help_panel=RUNNING)
def resize(
    run: RunFolder,
    workers: Annotated[int | None, typer.Option(
        "--workers", "-w", min=1, metavar="N", show_default=False, help="The new number of workers.",
    )] = None,
    servers: Annotated[int | None, typer.Option(
        "--servers", "-s", min=1, metavar="N", show_default=False, help="The new number of servers.",
    )] = None,
) -> None:  # fmt: skip
    """Change the number of workers or servers of a running job, and wait until that is done. No step is lost.

    Example: [bold]rallypoint resize runs/20260131-235959 --workers 4 --servers 3[/bold]
    """
    from rallypoint.launch.commands.ask import resize as order

    if not workers and not servers:
        raise UsageError("to what size? give --workers N, --servers N or both")
    print(order(run, workers or 0, servers or 0, lambda text: print(text, flush=True)))


@app.command(rich_help_panel=RUNNING)
def snapshot(run: RunFolder) -> None:
    """Ask a running job for a snapshot now, and wait until it is durable."""
    from rallypoint.launch.commands.ask import take_snapshot

    print(take_snapshot(run, print))


@app.command(rich_help_panel=RUNNING)
def pause(
    run: RunFolder,
    off: Annotated[bool, typer.Option("--off", help="Let a job go on that is paused.")] = False,
) -> None:  # fmt: skip
    """Compute no further step of a running job until `pause --off`. It outlives any process, and costs no step.

    Processes keep running, with what they hold in memory. A resumed run goes on.

    Example: [bold]rallypoint pause runs/20260131-235959[/bold]
    """
    from rallypoint.core.protocol import Pause
    from rallypoint.launch.commands.ask import order

    print(order(run, Pause(on=not off), print))


@app.command(rich_help_panel=RUNNING)
def stop(
    run: RunFolder,
    reason: Annotated[str, typer.Argument(help="Why: it is in the log and on the page.", show_default=False)] = "",
) -> None:
    """End a running job well, with the step that is computed now: as `run.stop()` in its script does.

    Example: [bold]rallypoint stop runs/20260131-235959 'good enough'[/bold]
    """
    from rallypoint.core.protocol import StopWanted
    from rallypoint.core.typed import LONGEST_NAME, printable
    from rallypoint.launch.commands.ask import order

    print(order(run, StopWanted(printable(reason, LONGEST_NAME)), print))


@app.command(rich_help_panel=RUNNING)
def drain(run: RunFolder, member: Annotated[str, typer.Argument(help="A worker or a server, as worker3.")]) -> None:
    """Send a worker or a server of a running job away: what it has goes to others, then its process ends.

    No other is started in its place. Only for jobs with a launcher; a process that was started by hand gets a SIGTERM.

    Example: [bold]rallypoint drain runs/20260131-235959 worker3[/bold]
    """
    from rallypoint.core.protocol import Drain
    from rallypoint.core.typed import can_name
    from rallypoint.launch.commands.ask import order

    if not can_name(member):
        raise UsageError("that is no name of a member")
    print(order(run, Drain(member), print))


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
        "--best", help="The snapshot with the best figure (evaluation.keep_best), not the newest.",
    )] = False,
) -> None:  # fmt: skip
    """Write a snapshot's model as safetensors, as a Hugging Face folder or as a torch checkpoint.

    Example: [bold]rallypoint export runs/20260131-235959 --to model.safetensors[/bold]
    """
    from rallypoint.store.export import export_snapshot

    print(export_snapshot(snapshot, to, average=average, best=best, format=format))
