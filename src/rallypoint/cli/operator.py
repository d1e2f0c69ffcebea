"""Orders to a running job: pause, continue, stop, drain."""

from __future__ import annotations

from typing import Annotated

import typer

from rallypoint.cli.app import RUNNING, app
from rallypoint.launch.options import RunFolder


@app.command(rich_help_panel=RUNNING)
def pause(run: RunFolder) -> None:
    """Compute no further step of a running job until `rallypoint continue`. It outlives any process, and costs no step.

    Processes keep running, with what they hold in memory. A resumed run goes on.

    Example: [bold]rallypoint pause runs/20260131-235959[/bold]
    """
    from rallypoint.launch.commands.ask import order
    from rallypoint.net.messages import Pause

    print(order(run, Pause(), print))


@app.command("continue", rich_help_panel=RUNNING)
def go_on(run: RunFolder) -> None:
    """Let a job go on that is paused."""
    from rallypoint.launch.commands.ask import order
    from rallypoint.net.messages import Pause

    print(order(run, Pause(on=False), print))


@app.command(rich_help_panel=RUNNING)
def stop(
    run: RunFolder,
    reason: Annotated[str, typer.Option(help="Why, for the log and everybody who looks.", show_default=False)] = "",
) -> None:
    """End a running job well, with the step that is computed now: as `run.stop()` in its script does.

    Example: [bold]rallypoint stop runs/20260131-235959 --reason 'good enough'[/bold]
    """
    from rallypoint.core.typed import LONGEST_NAME
    from rallypoint.launch.commands.ask import order
    from rallypoint.net.messages import StopWanted
    from rallypoint.observe.lines import printable

    print(order(run, StopWanted(printable(reason, LONGEST_NAME)), print))


@app.command(rich_help_panel=RUNNING)
def drain(run: RunFolder, member: Annotated[str, typer.Argument(help="A worker or a server, as worker3.")]) -> None:
    """Send a worker or a server of a running job away: what it has goes to others, then its process ends.

    No other is started in its place. Only for jobs with a launcher; a process that was started by hand gets a SIGTERM.

    Example: [bold]rallypoint drain runs/20260131-235959 worker3[/bold]
    """
    from rallypoint.core.typed import can_name
    from rallypoint.errors import UsageError
    from rallypoint.launch.commands.ask import order
    from rallypoint.net.messages import Drain

    if not can_name(member):
        raise UsageError("that is no name of a member")
    print(order(run, Drain(member), print))
