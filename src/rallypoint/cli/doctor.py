"""``rallypoint doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from rallypoint.cli.app import BY_HAND, app
from rallypoint.launch.access import access_of
from rallypoint.launch.options import Tls, TokenFile


@app.command(rich_help_panel=BY_HAND)
def doctor(
    listen: Annotated[str, typer.Option(
        metavar="HOST:PORT", help="Be this machine's probe, for a doctor elsewhere, until Ctrl-C.",
    )] = "",
    probe: Annotated[list[str] | None, typer.Option(
        metavar="HOST:PORT", help="A probe's address; repeat it: every link between two of them is measured.",
    )] = None,
    coordinator: Annotated[str, typer.Option(
        metavar="HOST:PORT", help="A running job's coordinator: is it there, does it take the token?",
    )] = "",
    token_file: TokenFile = "", tls: Tls = "",
    snapshots: Annotated[str, typer.Option(
        metavar="URL", help="Where snapshots would go: can they, and is there room?",
    )] = "",
    heartbeat: Annotated[float, typer.Option(
        min=0.5, metavar="S", help="The job's --heartbeat, to judge links by.",
    )] = 3.0,
) -> None:  # fmt: skip
    """Examine this machine, or all machines of a cluster to be: what would break a job, or change its bytes?

    It says for each finding what to do, and ends with status 1 if something is bad. On each machine:
    [bold]rallypoint doctor --listen 10.0.0.7:4711 --token-file job.token[/bold], and then on any of them:

    Example: [bold]rallypoint doctor --token-file job.token --probe 10.0.0.7:4711 --probe 10.0.0.8:4711[/bold]
    """
    from rallypoint.launch.commands.doctor import Doctor, Level
    from rallypoint.launch.commands.doctor import listen as be_a_probe
    from rallypoint.launch.console import Screen

    screen, access = Screen(highlight=False), access_of(token_file, "observer", tls, bind=listen)
    if listen:
        be_a_probe(access, listen, screen)
        return
    it = Doctor(screen, access, heartbeat)
    here = it.machine()
    if snapshots:
        it.store(snapshots)
    if coordinator:
        it.coordinator(coordinator)
    if probe:
        it.machines(here, probe)
    raise typer.Exit(int(it.worst is Level.BAD))
