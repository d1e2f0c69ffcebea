"""The address that others are told: not always the one that a process binds to."""

from __future__ import annotations

import ipaddress
import socket

from rallypoint.errors import LinkError, UsageError


def advertised(bound: str, wanted: str = "", towards: str = "") -> str:
    """Where others reach a process that listens at `bound`.

    `wanted` (``host`` or ``host:port``) if given. Else `bound`, unless that is a wildcard (0.0.0.0 or ::): then the
    address of the interface through which this machine reaches `towards`. UsageError when that would be a wildcard.
    """
    port = bound.rpartition(":")[2]
    if wanted:
        host, colon, own_port = wanted.rpartition(":")
        address = wanted if colon and own_port.isdigit() and host else f"{wanted}:{port}"
        if _is_wildcard(address):
            raise UsageError(f"nobody can connect to {address}: give --advertise an address that others can reach")
        return address
    if not _is_wildcard(bound):
        return bound
    if not towards:
        raise UsageError(f"it listens at {bound}, which others cannot connect to: add --advertise HOST:PORT")
    host = _interface(towards)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_wildcard(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_unspecified
    except ValueError:
        return False


def _interface(towards: str) -> str:
    """Our own address on the way to `towards`. It asks the routing table and sends nothing."""
    host, _, port = towards.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(place)
            return str(sock.getsockname()[0])
    except (OSError, ValueError) as error:
        raise LinkError(f"there is no way to {towards}: {error}; add --advertise HOST:PORT") from None
