"""The connections that have not proved yet that they belong to the job: a bounded number of them."""

from __future__ import annotations

import ipaddress
import threading

from rallypoint.net.transport import Connection

MOST, MOST_FROM_ONE = 256, 128  # a launcher's members may all join at once, from one address


class Unproven:
    """At most `most` connections, at most `most_from_one` of them from one address. Thread-safe.

    If there are too many, the oldest of the address with the most goes first: so who comes from elsewhere is not pushed
    out by a crowd. An address is a host; of IPv6 it is the network of 64 bits, because a host may use all of it. Where
    the process may open few files, the numbers are smaller: a quarter, and an eighth, of its limit.
    """

    def __init__(self, most: int = MOST, most_from_one: int = MOST_FROM_ONE) -> None:
        files = _files()
        self.most = max(4, min(most, files // 4))
        self.most_from_one = max(2, min(most_from_one, files // 8))
        self._by_host: dict[str, dict[Connection, None]] = {}
        self._lock = threading.Lock()

    def __contains__(self, connection: Connection) -> bool:
        with self._lock:
            return connection in self._by_host.get(_host(connection), ())

    def add(self, connection: Connection) -> Connection | None:
        """Note a new connection. Returns the one to close for it, if there are too many; that one is forgotten."""
        with self._lock:
            own = self._by_host.setdefault(_host(connection), {})
            own[connection] = None
            if len(own) <= self.most_from_one and self._count() <= self.most:
                return None
            crowd = own if len(own) > self.most_from_one else max(self._by_host.values(), key=len)
            oldest = next(iter(crowd))
            self._remove(oldest)
            return oldest

    def remove(self, connection: Connection) -> bool:
        """It has proved itself, or has ended. Returns False if `add` has returned it already."""
        with self._lock:
            return self._remove(connection)

    def _remove(self, connection: Connection) -> bool:
        host = _host(connection)
        own = self._by_host.get(host, {})
        if connection not in own:
            return False
        del own[connection]
        if not own:
            del self._by_host[host]
        return True

    def _count(self) -> int:
        return sum(map(len, self._by_host.values()))


def _host(connection: Connection) -> str:
    """The host of its peer, "host:port"."""
    host = connection.peer.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host  # not of TCP
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else host


def _files() -> int:
    """How many files this process may open."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 4 * MOST
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4 * MOST if soft == resource.RLIM_INFINITY else soft
