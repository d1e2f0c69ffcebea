"""The addresses of this machine's network interfaces, by name. Linux only: of others, give the address itself."""

from __future__ import annotations

import ipaddress
import socket
import struct
from pathlib import Path

from rallypoint.errors import UsageError

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_IFREQ = 40  # bytes of a struct ifreq: 16 of name, then a sockaddr
_IPV6 = Path("/proc/net/if_inet6")


def at_interface(bind: str, interface: str) -> str:
    """Return `bind` ("host:port") with the address of `interface` in place of its host; without one, `bind` itself.

    It is the interface's IPv4 address, or its first IPv6 address that others can reach, if it has no other or if the
    host of `bind` is an IPv6 address. UsageError if there is no such interface, or no such address.
    """
    if not interface:
        return bind
    host, _, port = bind.rpartition(":")
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise UsageError(f"there is no interface {interface}: this machine has {', '.join(names)}")
    wanted = [_ipv6] if ":" in host else [_ipv4, _ipv6]
    found = next((address for of in wanted if (address := of(interface))), "")
    if not found:
        what = "IPv6 address" if ":" in host else "address"
        raise UsageError(f"the interface {interface} has no {what} that others can reach: is it up?")
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def _ipv4(interface: str) -> str:
    """Its IPv4 address; "" if it has none."""
    import fcntl  # (not on every system)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack(f"{_IFREQ}s", interface.encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])  # behind the name, the family and the port


def _ipv6(interface: str) -> str:
    """Its first IPv6 address that is not link-local; "" if it has none."""
    try:
        lines = _IPV6.read_text().splitlines()
    except OSError:  # a system without IPv6
        return ""
    for line in lines:  # "fd000000000000000000000000000007 02 40 00 80     eth0"
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if name == interface and not address.is_link_local:
            return str(address)
    return ""
