"""With what a process gets into a job: the job's token, and the transport that its links use."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Transport

_LONGEST = 4096  # bytes of a token file


@dataclass(frozen=True, slots=True)
class Access:
    """With what a process gets into a job.

    Attributes:
        token: the job's token; "" if there is none.
        transport: what its links are made with.
    """

    token: str = field(default="", repr=False)
    transport: Transport = field(default_factory=TcpTransport)


def access_of(token_file: str = "") -> Access:
    """Return the access that a process was given: by this file, or else by the environment. "": no file.

    RALLYPOINT_TOKEN holds the token itself, RALLYPOINT_TOKEN_FILE names a file that does. UsageError if a file that is
    named cannot be read, or holds no token.
    """
    if not token_file and (token := os.environ.get(environment.TOKEN, "")):
        return Access(token)
    path = token_file or os.environ.get(environment.TOKEN_FILE, "")
    return Access(read_token(Path(path)) if path else "")


def read_token(path: Path) -> str:
    """Return the token in a file, without the spaces and newlines around it. UsageError if there is none."""
    try:
        with path.open("rb") as file:
            token = file.read(_LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"the token file {path} cannot be read: {why}") from None
    if not token:
        raise UsageError(f"the token file {path} is empty: `rallypoint token > {path}` makes a token")
    return token
