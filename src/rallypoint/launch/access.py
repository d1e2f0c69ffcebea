"""With what a process gets into a job: its role's token, and the transport that its links use."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from rallypoint.errors import Explained, UsageError
from rallypoint.launch import environment
from rallypoint.net.certificates import TlsFiles
from rallypoint.net.handshake import ROLES, check_exposure, new_token, role_token
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.tls import TlsTransport
from rallypoint.net.transport import Transport

_LONGEST = 4096  # bytes of a token file


@dataclass(frozen=True, slots=True)
class Access:
    """With what a process gets into a job."""

    token: str = field(default="", repr=False)  # the role's token, or the job's; "" if there is none
    transport: Transport = field(default_factory=TcpTransport)  # what its links are made with


def access_of(token_file: str = "", role: str = "", tls: str = "", *, bind: str = "") -> Access:
    """Return the access that a process was given: by this file and folder, or else by the environment. "": none.

    RALLYPOINT_TOKEN holds the token itself, RALLYPOINT_TOKEN_FILE names a file that does. With a `role`, its token
    follows from the job's, which is not kept then. `tls` is the folder of the role's certificate, or the one above it,
    as in RALLYPOINT_TLS. UsageError if a file that is named cannot be read, or holds no token or no usable certificate,
    or one of another role; or if others can reach `bind`, where it will listen, and the job's token is too short: the
    role's, which follows from it, is long, and can be guessed as easily.
    """
    token = "" if token_file else os.environ.get(environment.TOKEN, "")
    path = token_file or os.environ.get(environment.TOKEN_FILE, "")
    if not token and path:
        token = read_token(Path(path))
    folder = tls or os.environ.get(environment.TLS, "")
    links = transport_of(folder, role) if role else TcpTransport()
    access = Access(role_token(token, role) if role else token, links)
    if bind:
        check_exposure(access.transport, bind, token)
    return access


def transport_of(tls: str, role: str) -> Transport:
    """Return what links of this role are made with: TLS with the certificates in this folder; "": TCP alone.

    UsageError if the certificates cannot be used, or are another role's.
    """
    return TlsTransport(TlsFiles(Path(tls), role)) if tls else TcpTransport()


def token_for(role: str, token_file: str) -> str:
    """Return the token of this role, from the job's as `access_of` finds it; without a role, a new job's token.

    UsageError if there is no such role, or no job's token.
    """
    if not role:
        if token_file:
            raise UsageError("--token-file is of a job that has a token: which --role's token is wanted?")
        return new_token()
    if role not in ROLES:
        raise UsageError(f"there is no --role {role}: choose of {', '.join(ROLES)}; a coordinator has the job's own")
    if token := access_of(token_file).token:
        return role_token(token, role)
    raise UsageError("a role's token follows from the job's: give --token-file FILE; `rallypoint token` makes a job's")


def keep_private(fd: int) -> None:
    """If `fd` is a new file (``rallypoint token > FILE``), let only its owner read it."""
    about = os.fstat(fd)
    if stat.S_ISREG(about.st_mode) and not about.st_size:
        with contextlib.suppress(OSError):  # a filesystem without modes
            os.fchmod(fd, 0o600)


def read_token(path: Path) -> str:
    """Return the token in a file, without the spaces and newlines around it. UsageError if there is none."""
    cannot = Explained(UsageError, f"the token file {path} cannot be read", of=(OSError, UnicodeDecodeError))
    with cannot, path.open("rb") as file:
        token = file.read(_LONGEST).decode().strip()
    if not token:
        raise UsageError(f"the token file {path} is empty: `rallypoint token > {path}` makes a token")
    return token
