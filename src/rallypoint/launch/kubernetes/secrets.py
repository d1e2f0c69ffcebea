"""The Secret with a job's tokens, and the one with its certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rallypoint.errors import UsageError
from rallypoint.launch.kubernetes.names import check_name
from rallypoint.net.certificates import CA, CERTIFICATE, KEY
from rallypoint.net.handshake import new_token, role_token

_ROLES = ("coordinator", "server", "worker")


def new_secret(name: str) -> dict[str, Any]:
    """Return a Secret with a new token for each role. UsageError if it cannot be called so."""
    token = new_token()
    return _secret(name, {role: role_token(token, role) for role in _ROLES})


def certificates(name: str, folder: Path) -> dict[str, Any]:
    """Return a Secret with each role's certificate, from a folder of `rallypoint token --tls`.

    UsageError if one is missing. Its keys are ``server-cert.pem`` and so on; the CA's certificate is everybody's.
    """
    secret = _secret(name, {})
    for role in _ROLES:
        for file in (CA, CERTIFICATE, KEY):
            try:
                secret["stringData"][file if file == CA else f"{role}-{file}"] = (folder / role / file).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{folder / role / file} cannot be read ({error}): `rallypoint token --tls "
                                 f"{folder}` makes the certificates") from None
    return secret


def _secret(name: str, data: dict[str, str]) -> dict[str, Any]:
    check_name(name, "the Secret")
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque", "stringData": data}
