"""The listening side of a role: accepts connections, checks the token, serves each in its own thread."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import threading
import time
from collections.abc import Callable

from rallypoint.core.protocol import Hello, Welcome
from rallypoint.core.typed import LONGEST_NAME, can_name, printable
from rallypoint.errors import AccessDenied, CorruptFrame, LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Backlog, Channel
from rallypoint.net.handshake import Identity, check_exposure, greet
from rallypoint.net.transport import Connection, Transport
from rallypoint.observe.lines import Sparingly
from rallypoint.observe.trace import Tracer
from rallypoint.observe.usage import most_files

log = logging.getLogger("rallypoint")

_MOST_WAITING, _MOST_WAITING_IN_ALL = 256 << 20, 1 << 30  # bytes that members have not read; a server sets its own
MOST, MOST_FROM_ONE = 256, 128  # connections in their handshake: a launcher's members may all join at once
_PAUSE_S = 0.05  # after a connection that could not be taken
_LETTING_GO_S = 1.0  # seconds to wait for the thread of a connection that was closed to make room


class Gate:
    """Listens at `bind` as `me` until closed. UsageError if other machines can reach `bind` and the token is too short.

    `admit` gets a Hello whose token was right. It returns the Welcome, or raises RallypointError to refuse. Then
    `serve` runs in the connection's own thread until it returns or raises. A ProtocolError closes only that connection,
    with a sentence to both sides (I9).

    `me` is replaced when the coordinator admits a server: it has an incarnation and a secret then.

    Strangers cost little: `unproven` bounds how many connections may be in their handshake, the handshake has one
    deadline, and few log lines tell of them. Nothing but `close` ends the accepting.
    """

    def __init__(
        self, transport: Transport, bind: str, me: Identity,
        admit: Callable[[Hello], Welcome], serve: Callable[[Channel, Hello], None], tracer: Tracer | None = None,
        *, unproven: Unproven | None = None,
    ) -> None:  # fmt: skip
        check_exposure(transport, bind, me.token)
        self._listener = transport.listen(bind)
        self.address = self._listener.address
        self.me = me
        self._admit, self._serve, self._tracer = admit, serve, tracer
        self._unproven = Unproven() if unproven is None else unproven
        self.backlog = Backlog(_MOST_WAITING, _MOST_WAITING_IN_ALL)  # of all connections
        self._of_strangers, self._of_members = Sparingly(), Sparingly()  # so that a crowd does not hide a member's
        self._open: dict[Connection, threading.Thread] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept_all, name="accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, close every connection, join every thread."""
        with self._lock:
            self._closed = True
            threads = dict(self._open)
        self._listener.close()
        for connection in threads:
            connection.close()
        for thread in (self._thread, *threads.values()):
            if thread is not threading.current_thread():
                thread.join()
        self._of_strangers.close()
        self._of_members.close()

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                self._begin(self._listener.accept())
            except LinkError:
                return
            except Exception as error:  # no thread, no memory, an error of the network: it passes, and others come
                self._of_strangers.warn(f"{self.address} cannot take a connection now: {error!r}")
                time.sleep(_PAUSE_S)

    def _begin(self, connection: Connection) -> None:
        """Serve a new connection in a thread of its own."""
        try:
            self._make_room(self._unproven.add(connection))
            thread = threading.Thread(
                target=self._run, args=(connection, next(self._numbers)), name=f"from {connection.peer}", daemon=True
            )
            with self._lock:
                if self._closed:
                    raise LinkError("no longer listening")
                thread.start()  # under the lock, so that `close` never joins a thread that has not started
                self._open[connection] = thread
        except BaseException:
            self._unproven.remove(connection)
            connection.close()
            raise

    def _make_room(self, oldest: Connection | None) -> None:
        """Close a connection, and wait for its thread: they may not come faster than they go."""
        if oldest is None:
            return
        self._of_strangers.warn(
            f"too many connections that have not proved themselves: closed the oldest, from {oldest.peer}"
        )
        with self._lock:
            thread = self._open.get(oldest)
        oldest.close()
        if thread is not None:
            thread.join(_LETTING_GO_S)

    def _run(self, connection: Connection, number: int) -> None:
        try:
            self._greet_and_serve(connection, number)
        except (ProtocolError, AccessDenied, CorruptFrame) as error:
            line = f"closed the connection from {connection.peer}: {error}"
            if connection in self._unproven:  # one that tries again and again comes from another port each time
                self._of_strangers.warn(line, key=line.replace(connection.peer, _host(connection)))
            else:
                self._of_members.warn(line)
        except LinkError as error:
            log.debug("%s", printable(str(error)))
        finally:
            self._unproven.remove(connection)
            connection.close()
            with self._lock:
                self._open.pop(connection, None)

    def _greet_and_serve(self, connection: Connection, number: int) -> None:
        greeting = greet(connection, self.me)
        hello = greeting.hello
        if not self._unproven.remove(connection):
            raise LinkError(f"{connection.peer} made room for another connection")
        try:
            for name in (hello.role, hello.id, hello.host, hello.address, hello.near):
                if not can_name(name):
                    wrong = f"the name {printable(name, 40)!r} has control characters, or more than {LONGEST_NAME}"
                    raise ProtocolError(wrong)
            answer = self._admit(hello)
        except RallypointError as error:
            greeting.refuse(str(error))
            raise AccessDenied(f"refused {hello.role} {hello.id}: {error}") from None
        keys = greeting.welcome(answer)
        channel = Channel(connection, hello.id, keys, self._tracer, number, self.backlog)
        try:
            self._serve(channel, hello)
        except ProtocolError as error:
            channel.refuse(str(error))
            channel.flush(1.0)
            raise
        finally:
            channel.close()


# ---- who has not proved itself yet --------------------------------------------------------------------------------


class Unproven:
    """At most `most` connections, at most `most_from_one` of them from one address. Thread-safe.

    If there are too many, the oldest of the address with the most goes first: so who comes from elsewhere is not pushed
    out by a crowd. An address is a host; of IPv6 it is the network of 64 bits, because a host may use all of it. Where
    the process may open few files, the numbers are smaller: a quarter, and an eighth, of its limit.
    """

    def __init__(self, most: int = MOST, most_from_one: int = MOST_FROM_ONE) -> None:
        files = most_files()
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
            if len(own) <= self.most_from_one and sum(map(len, self._by_host.values())) <= self.most:
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


def _host(connection: Connection) -> str:
    """The host of its peer, "host:port"."""
    host = connection.peer.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host  # not of TCP
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else host
