"""The command that makes tokens and certificates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.app import BY_HAND, app
from rallypoint.errors import UsageError
from rallypoint.net.handshake import ROLES


@app.command(rich_help_panel=BY_HAND)
def token(
    role: Annotated[str, typer.Option(
        metavar="ROLE", help=f"Print this role's token, which follows from the job's: {', '.join(ROLES)}.",
    )] = "",
    token_file: Annotated[str, typer.Option(
        metavar="FILE", help="With --role: the file that holds the job's token; by default as of the other commands.",
    )] = "",
    tls: Annotated[Path | None, typer.Option(
        metavar="FOLDER", show_default=False,
        help="Make certificates in this folder instead: a CA of the job's own, and one certificate for each role.",
    )] = None,
    days: Annotated[int, typer.Option(min=1, metavar="N", help="With --tls: how long they are valid.")] = 365,
) -> None:  # fmt: skip
    """Print a new token for a job, with --role the one of a role, or make its members' certificates (--tls).

    With a role's token a process can be of that role and of no other. Give the coordinator the job's token, and each
    machine those of the roles that it runs. A new file that the token is written to is made readable for you alone.

    Example: [bold]rallypoint token > job.token[/bold]

    Then: [bold]rallypoint token --role worker --token-file job.token > worker.token[/bold]

    With --tls, certificates for the option --tls of the other commands. Copy to each machine only the folders of the
    roles that run there; FOLDER/ca stays, and signs renewed certificates when the command is run again. A running job
    takes renewed ones for its new connections: [bold]rallypoint token --tls certificates[/bold]
    """
    if tls is not None:
        if role or token_file:
            raise UsageError("--tls makes certificates of all roles, and no token: give it alone")
        _certify(tls, days)
        return
    from rallypoint.launch.access import keep_private, token_for

    found = token_for(role, token_file)
    keep_private(sys.stdout.fileno())
    print(found)


def _certify(folder: Path, days: int) -> None:
    from rallypoint.net.certificates import make_certificates

    until = make_certificates(folder, days=days)
    print(f"certificates for every role are in {folder}; they are valid until {until:%Y-%m-%d %H:%M} UTC")
