"""At which of this machine's addresses a process listens."""

from __future__ import annotations

import contextlib
import socket

EVERYWHERE = "[::]"  # all addresses of both families: a cluster may have the one, the other or both


def family_of(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family of the socket that listens at `host`, an address or a name without brackets, and where.

    ``::`` is all addresses of both families; on a system without IPv6 it is ``0.0.0.0``. See `both_families`.
    """
    if host == "::" and not socket.has_dualstack_ipv6():
        return socket.AF_INET, "0.0.0.0"
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), host


def both_families(sock: socket.socket, host: str) -> None:
    """Let a socket that will listen at ``::`` take connections of IPv4 too, whatever the system's default is."""
    if sock.family == socket.AF_INET6 and host == "::":
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def socket_for(host: str) -> tuple[socket.socket, str]:
    """Return a new TCP socket that can listen at `host`, and where it is to be bound: see `family_of`."""
    family, where = family_of(host)
    sock = socket.socket(family, socket.SOCK_STREAM)
    both_families(sock, where)
    return sock, where
