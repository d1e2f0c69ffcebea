"""One worker's links to all servers of a view."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rallypoint.config import JobConfig, audits_of, paces_by_port
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.handshake import Credentials
from rallypoint.net.transport import Limits, Transport
from rallypoint.observe.trace import Tracer
from rallypoint.worker.exchange.link import Receiver, ServerLink


@dataclass(frozen=True, slots=True)
class Context:
    """What an exchange needs from its process."""

    credentials: Credentials
    transport: Transport
    tracer: Tracer
    say: Callable[[str], None]

    @property
    def me(self) -> str:
        """This worker's name."""
        return self.credentials.me.id


class Links:
    """The connections that the shell asks for. `view` returns the number of the view in force.

    Links are opened and ended under the exchange's lock for views, one view at a time. Any thread may look one up.
    """

    def __init__(self, context: Context, config: JobConfig, view: Callable[[], ViewNumber]) -> None:
        self._context, self._config, self._view = context, config, view
        self._links: dict[str, ServerLink] = {}
        self._lock = threading.Lock()  # of what follows: the coordinator's thread and the main thread change it
        self._overdraws = False
        self._overdrawn_step = -1
        self._audits = audits_of(config)

    def get(self, server: str) -> ServerLink | None:
        """Return the link to that server; None if no view here has named it."""
        return self._links.get(server)

    def open(self, servers: Iterable[Member], receiver: Receiver, view: View) -> None:
        """Start to connect to these servers and aggregators of `view`. `receiver` gets what arrives."""
        config = self._config
        measured = paces_by_port(config) and view.workers_by_port()
        limits = Limits.of(view.in_flight(config.in_flight_bytes), view.paced(config.pace_mbit), measured=measured)
        equal = limits.shared(len(view.servers))
        shares = {server: limits.shared(len(view.servers), part) for server, part in view.port_parts().items()}
        for name, link in self._links.items():
            link.limit(shares.get(name, equal))
        for server in servers:
            link = self._links[server.id] = ServerLink(
                transport=self._context.transport, server=server, credentials=self._context.credentials,
                window=self._config.window, receiver=receiver, view=self._view, tracer=self._context.tracer,
                role="aggregator" if server in view.aggregators else "server",
            )  # fmt: skip
            link.limit(shares.get(server.id, equal))
            with self._lock:
                link.overdraw(self._overdraws)
            link.start()  # last: what arrives at once looks up its link here

    def overdraw(self, step: int, *, rolled_back: bool = False) -> None:
        """Send without credits on every link, present or to come, until a version after `step` is installed."""
        with self._lock:
            self._overdrawn_step = step if rolled_back else max(step, self._overdrawn_step)
            self._switch(True)

    def installed(self, version: int) -> None:
        """The worker has installed `version`. Keep to the window again, unless links overdraw for that step too: they
        do if it is audited."""
        with self._lock:
            if self._audits is not None and self._audits.audited(version):
                # It sends lower replicas after its own: while they are missing, servers keep credit of higher ones back
                self._overdrawn_step = max(version, self._overdrawn_step)
                self._switch(True)
            elif version > self._overdrawn_step:
                self._switch(False)

    def _switch(self, on: bool) -> None:
        if on != self._overdraws:
            self._overdraws = on
            for link in list(self._links.values()):
                link.overdraw(on)

    def end(self, servers: Iterable[str]) -> None:
        """End these links and their threads. After that they touch no slot."""
        for server in servers:
            self._links.pop(server).close()

    def close(self) -> None:
        """End every link."""
        for link in self._links.values():
            link.close()

    def unreachable(self) -> dict[str, float]:
        """The servers that cannot be reached -> seconds."""
        missed = {link.server.id: link.unreachable() for link in list(self._links.values())}
        return {server: seconds for server, seconds in missed.items() if seconds > 0}

    def describe(self, shards: Iterable[int], homes: Mapping[int, str]) -> str:
        """Name the servers that these shards come from, as a phrase."""
        counts: dict[str, int] = {}
        for shard in shards:
            counts[homes[shard]] = counts.get(homes[shard], 0) + 1
        return "; ".join(f"{n} shard{'s' * (n != 1)} from {self._name(home)}" for home, n in counts.items())

    def _name(self, server: str) -> str:
        link = self._links.get(server)
        if link is None:
            return f"server {server}"
        member = link.server
        return f"{link.role} {server} on {member.host} ({member.address}{', ' + link.trouble if link.trouble else ''})"
