"""The command that makes tokens."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rallypoint.cli.app import BY_HAND, app
from rallypoint.net.handshake import ROLES


@app.command(rich_help_panel=BY_HAND)
def token(
    role: Annotated[str, typer.Option(
        metavar="ROLE", help=f"Print this role's token, which follows from the job's: {', '.join(ROLES)}.",
    )] = "",
    token_file: Annotated[str, typer.Option(
        metavar="FILE", help="With --role: the file that holds the job's token; by default as of the other commands.",
    )] = "",
) -> None:  # fmt: skip
    """Print a new token for a job; with --role, the token with which a process can be of that role and of no other.

    Give the coordinator the job's token, and each machine those of the roles that it runs. A new file that the token is
    written to is made readable for you alone.

    Example: [bold]rallypoint token > job.token[/bold]

    Then: [bold]rallypoint token --role worker --token-file job.token > worker.token[/bold]
    """
    from rallypoint.launch.access import keep_private, token_for

    found = token_for(role, token_file)
    keep_private(sys.stdout.fileno())
    print(found)
