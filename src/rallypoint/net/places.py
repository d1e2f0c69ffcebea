"""The address that other processes connect to. It can differ from the address that a process binds to."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint.errors import Explained, LinkError, UsageError, to_install
from rallypoint.net.tcp import is_ipv6, split_address

# Where a job's coordinator may be: addresses, a file, or DNS. Members ask again at each attempt to reach it.

if TYPE_CHECKING:
    import dns.resolver

_FILE, _DNS = "file:", "srv+dns://"
_LONGEST = 65536  # bytes of a file of addresses
_MOST = 64  # addresses: each that nobody answers at may cost a second
_RESOLVER_S = 5.0


class Whereabouts:
    """The places where a coordinator may listen. Whoever proves there that it is the coordinator is it.

        10.0.0.7:4700,10.0.0.8:4700     these addresses, in this order
        file:/shared/job/coordinator    one address a line; # begins a comment
        srv+dns://_job7._tcp.lab.org    the SRV records of this name; needs the package dnspython

    UsageError if none is given, or a package is missing.
    """

    def __init__(self, given: str) -> None:
        self._given = given
        self._resolver = _resolver() if given.startswith(_DNS) else None
        if given in (_FILE, _DNS) or not given.strip(", "):
            raise UsageError(
                f"'{given}' names no place: write host:port, host:port,host:port, {_FILE}PATH or {_DNS}NAME"
            )

    def __str__(self) -> str:
        return self._given

    def now(self) -> list[str]:
        """Return the addresses that are to be tried now, in this order, each once.

        LinkError if there are none now: a file that is not there yet, a name server that does not answer.
        """
        if self._resolver is not None:
            found = _in_dns(self._resolver, self._given.removeprefix(_DNS))
        elif self._given.startswith(_FILE):
            found = _in_file(Path(self._given.removeprefix(_FILE)))
        else:
            found = [address.strip() for address in self._given.split(",") if address.strip()]
        return list(dict.fromkeys(found))[:_MOST]


def _in_file(path: Path) -> list[str]:
    where = f"the coordinator's address is to be in {path}, which"
    cannot = Explained(LinkError, f"{where} cannot be read", of=(OSError, UnicodeDecodeError))
    with cannot, path.open("rb") as file:
        lines = file.read(_LONGEST).decode().splitlines()
    found = [address for line in lines if (address := line.partition("#")[0].strip())]
    with Explained(LinkError, f"{path}", of=(UsageError,)):
        for address in found:
            split_address(address)
    if not found:
        raise LinkError(f"{where} has none")
    return found


def _resolver() -> dns.resolver.Resolver:
    try:
        import dns.resolver
    except ImportError:
        raise UsageError(f"{_DNS} needs the package dnspython: {to_install('dns')}") from None
    none = f"{_DNS} needs a name server, and this machine names none"
    with Explained(UsageError, none, of=(dns.resolver.NoResolverConfiguration,)):
        return dns.resolver.get_default_resolver()


def _in_dns(resolver: dns.resolver.Resolver, name: str) -> list[str]:
    """The targets of the SRV records (RFC 2782), by priority, then the heaviest first."""
    import dns.exception

    where = f"the coordinator's address is to be in the SRV records of {name}"
    with Explained(LinkError, where, of=(dns.exception.DNSException,)):
        answer = resolver.resolve(name, "SRV", lifetime=_RESOLVER_S)
    records = sorted(answer, key=lambda record: (record.priority, -record.weight, str(record.target), record.port))
    return [f"{record.target.to_text(omit_final_dot=True)}:{record.port}" for record in records]


# The addresses of this machine's network interfaces, by name. Linux only: of others, give the address itself.

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_IFREQ = 40  # bytes of a struct ifreq: 16 of name, then a sockaddr
_IPV6 = Path("/proc/net/if_inet6")


def at_interface(bind: str) -> str:
    """Return `bind` ("host:port") with an address in place of its host if that is a network interface: ``eth0:4700``.

    It is the interface's IPv4 address, or its first IPv6 address that others can reach, if it has no other or if its
    name stands in brackets: ``[eth0]:4700``. UsageError if there is no such address.
    """
    host, _, port = bind.rpartition(":")
    interface, only_ipv6 = host.strip("[]"), host.startswith("[")
    if interface not in [name for _, name in socket.if_nameindex()]:
        return bind
    wanted = [_ipv6] if only_ipv6 else [_ipv4, _ipv6]
    found = next((address for of in wanted if (address := of(interface))), "")
    if not found:
        what = "IPv6 address" if only_ipv6 else "address"
        raise UsageError(f"the interface {interface} has no {what} that others can reach: is it up?")
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def _ipv4(interface: str) -> str:
    """Its IPv4 address; "" if it has none."""
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
