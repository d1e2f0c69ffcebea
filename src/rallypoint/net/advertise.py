"""The address that other processes connect to. It can differ from the address that a process binds to."""

from __future__ import annotations

import ipaddress
import socket

from rallypoint.errors import LinkError, UsageError


def advertised(bound: str, wanted: str = "", towards: str = "") -> str:
    """The address where others reach a process that listens at `bound`.

    It is `wanted` (``host`` or ``host:port``), if given. Else it is `bound`, unless that is a wildcard (0.0.0.0 or ::).
    Else it is the address of the network interface that leads to `towards`. UsageError if `wanted` is a wildcard, or
    `towards` is needed and empty. LinkError if there is no route to `towards`.
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
    """This machine's own address on the route to `towards`. Reads the routing table and sends nothing."""
    host, _, port = towards.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(place)
            return str(sock.getsockname()[0])
    except (OSError, ValueError) as error:
        raise LinkError(f"there is no way to {towards}: {error}; add --advertise HOST:PORT") from None
