"""Where a job's coordinator may be: addresses, a file, or DNS. Members ask again at each attempt to reach it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint.errors import LinkError, UsageError, to_install
from rallypoint.net.tcp import split_address

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
    try:
        with path.open("rb") as file:
            lines = file.read(_LONGEST).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LinkError(f"the coordinator's address is to be in {path}, which cannot be read: {why}") from None
    found = [address for line in lines if (address := line.partition("#")[0].strip())]
    try:
        for address in found:
            split_address(address)
    except UsageError as error:
        raise LinkError(f"{path}: {error}") from None
    if not found:
        raise LinkError(f"the coordinator's address is to be in {path}, which has none")
    return found


def _resolver() -> dns.resolver.Resolver:
    try:
        import dns.resolver
    except ImportError:
        raise UsageError(f"{_DNS} needs the package dnspython: {to_install('dns')}") from None
    try:
        return dns.resolver.get_default_resolver()
    except dns.resolver.NoResolverConfiguration as error:
        raise UsageError(f"{_DNS} needs a name server, and this machine names none: {error}") from None


def _in_dns(resolver: dns.resolver.Resolver, name: str) -> list[str]:
    """The targets of the SRV records (RFC 2782), by priority, then the heaviest first."""
    import dns.exception

    try:
        answer = resolver.resolve(name, "SRV", lifetime=_RESOLVER_S)
    except dns.exception.DNSException as error:
        raise LinkError(f"the coordinator's address is to be in the SRV records of {name}: {error}") from None
    records = sorted(answer, key=lambda record: (record.priority, -record.weight, str(record.target), record.port))
    return [f"{record.target.to_text(omit_final_dot=True)}:{record.port}" for record in records]
