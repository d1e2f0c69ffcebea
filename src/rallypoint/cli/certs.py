"""The command that makes certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.app import BY_HAND, app


@app.command(rich_help_panel=BY_HAND)
def certs(
    folder: Annotated[Path, typer.Argument(help="Where: one folder for each role, and one for the CA.")],
    host: Annotated[list[str] | None, typer.Option(
        metavar="NAME|IP", help="For programs that check it, as proxies do (members do not); may be repeated.",
    )] = None,
    days: Annotated[int, typer.Option(min=1, metavar="N", help="How long the certificates are valid.")] = 365,
) -> None:  # fmt: skip
    """Make the certificates of a job's members, for --tls: a CA of the job's own, and one certificate for each role.

    Copy to each machine only the folders of the roles that run there; FOLDER/ca stays, and signs renewed certificates
    when the command is run again. A running job takes renewed certificates for its new connections.

    Example: [bold]rallypoint certs job-certificates[/bold]

    Then: [bold]rallypoint server --tls job-certificates --coordinator 10.0.0.7:4700[/bold]
    """
    from rallypoint.net.certificates import make_certificates

    until = make_certificates(folder, hosts=host or [], days=days)
    print(f"certificates for every role are in {folder}; they are valid until {until:%Y-%m-%d %H:%M} UTC")
