"""The address that other processes connect to. It can differ from the address that a process binds to."""

from __future__ import annotations

import ipaddress
import socket

from rallypoint.errors import LinkError, UsageError
from rallypoint.net.tcp import is_ipv6


def wanted(bound: str, advertise: str) -> str:
    """What a process that listens at `bound` tells others, if its user has asked for `advertise`.

    `advertise` is ``host`` or ``host:port``. An IPv6 address stands in brackets, unless it cannot be one with a port:
    ``fd00::1``, but not ``fd00::1:4700``; one of IPv4 may. With "" it is `bound` itself. UsageError if nobody could
    connect there.
    """
    if not advertise:
        _refuse_link_local(bound)
        return bound
    if advertise.count(":") > 1 and not advertise.startswith("["):
        first, _, last = advertise.rpartition(":")
        if is_ipv6(first):
            raise UsageError(f"write an IPv6 address in brackets: --advertise [{advertise}], or [{first}]:{last}")
        if not is_ipv6(advertise):
            raise UsageError(f"'{advertise}' is no address: write --advertise HOST, HOST:PORT or [IPV6]:PORT")
        advertise = f"[{advertise}]"
    host, colon, own_port = advertise.rpartition(":")
    named = colon and own_port.isdigit() and host
    address = advertise if named else f"{advertise}:{bound.rpartition(':')[2]}"
    if (ip := _ip(address)) is not None and ip.version == 4:
        address = f"{ip}:{address.rpartition(':')[2]}"  # it may stand in brackets: who writes it knows not which it is
    if _is_wildcard(address):
        raise UsageError(f"nobody can connect to {address}: give --advertise an address that others can reach")
    _refuse_link_local(address)
    return address


def advertised(listening_at: str, advertise: str = "", towards: str = "") -> str:
    """The address where others reach a process.

    It is what is `wanted`, unless that is a wildcard (0.0.0.0 or ::). Then it is the address of the network interface
    that leads to `towards`. UsageError if `towards` is needed and empty, or as `wanted` raises it. LinkError if there
    is no route to `towards`.
    """
    address = wanted(listening_at, advertise)
    if not _is_wildcard(address):
        return address
    if not towards:
        raise UsageError(f"it listens at {address}, which others cannot connect to: add --advertise HOST:PORT")
    host, port = _interface(towards, socket.AF_INET if "." in address else socket.AF_UNSPEC), address.rpartition(":")[2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address in an address; None if it is a name."""
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None


def _is_wildcard(address: str) -> bool:
    ip = _ip(address)
    return ip is not None and ip.is_unspecified


def _refuse_link_local(address: str) -> None:
    """UsageError for fe80::...: it says not on which of another machine's links it is meant."""
    ip = _ip(address)
    if ip is not None and ip.version == 6 and ip.is_link_local:
        raise UsageError(
            f"{address} is link-local, and no other machine knows on which of its links: "
            "use a global address, or one of fd00::/8"
        )


def _interface(towards: str, family: int) -> str:
    """This machine's own address on the route to `towards`. Reads the routing table and sends nothing."""
    host, _, port = towards.rpartition(":")
    why: Exception = OSError("its own address on that way is link-local")
    try:
        for known, kind, _, _, place in socket.getaddrinfo(
            host.strip("[]"), int(port), family=family, type=socket.SOCK_DGRAM
        ):
            with socket.socket(known, kind) as sock:
                try:
                    sock.connect(place)
                except OSError as error:
                    why = error
                    continue
                found = str(sock.getsockname()[0])
                if known != socket.AF_INET6 or not ipaddress.ip_address(found.partition("%")[0]).is_link_local:
                    return found
    except (OSError, ValueError) as error:
        why = error
    raise LinkError(f"there is no way to {towards}: {why}; add --advertise HOST:PORT")
