"""One worker's links to all servers of a view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rallypoint.config import JobConfig
from rallypoint.core.view import View, ViewNumber
from rallypoint.net.transport import Transport, share_of
from rallypoint.observe.trace import Tracer
from rallypoint.worker.exchange.link import Arrivals, ServerLink


@dataclass(frozen=True, slots=True)
class Context:
    """What an exchange needs to know of this process."""

    me: str
    token: str
    transport: Transport
    tracer: Tracer
    say: Callable[[str], None]


class Links:
    """Made and ended with the views; `arrivals` gets what comes, `view` tells the number of the view in force.

    `connections`: those that stand, each with a number of its own. They are the exchange's lock's to guard.
    """

    def __init__(
        self, context: Context, config: JobConfig, arrivals: Arrivals, view: Callable[[], ViewNumber]
    ) -> None:
        self.connections: dict[str, int] = {}
        self._context, self._config, self._arrivals, self._view = context, config, arrivals, view
        self._links: dict[str, ServerLink] = {}
        self._connected = 0

    def get(self, server: str) -> ServerLink | None:
        """The link to that server; None if it is in no view that has come here."""
        return self._links.get(server)

    def open(self, view: View) -> None:
        """Links to servers that are new in this view begin."""
        share = share_of(self._config.in_flight_bytes, len(view.servers))
        for server in view.servers:
            if (link := self._links.get(server.id)) is not None:
                link.limit_in_flight(share)
                continue
            link = self._links[server.id] = ServerLink(
                transport=self._context.transport, server=server, me=self._context.me, token=self._context.token,
                window=self._config.window, arrivals=self._arrivals, view=self._view, tracer=self._context.tracer,
            )  # fmt: skip
            link.limit_in_flight(share)
            link.start()  # only now: what comes of it looks for it among the links

    def end_but(self, view: View, before: View | None, *, stale: bool) -> list[str]:
        """Links to servers that have been replaced end, threads and all, and those to servers that shards have moved
        away from (they might still receive one that its new home sends too); if what is being received is `stale`, all.
        The servers whose links are to be made anew."""
        losing = set() if before is None else {
            home for shard, home in before.primary.items() if view.primary.get(shard) != home
        }  # fmt: skip
        ended = []
        for id, link in list(self._links.items()):
            if stale or id in losing or link.server not in view.servers:
                del self._links[id]
                link.close()
                ended.append(id)
        return ended

    def close(self) -> None:
        """End every link."""
        for link in self._links.values():
            link.close()

    def up(self, server: str) -> None:
        """A connection stands (again)."""
        self._connected += 1
        self.connections[server] = self._connected

    def lost(self, server: str) -> None:
        """A connection is gone."""
        self.connections.pop(server, None)

    def describe(self, shards: Iterable[int], homes: Mapping[int, str]) -> str:
        """From whom these shards are to come, as a phrase."""
        counts: dict[str, int] = {}
        for shard in shards:
            counts[homes[shard]] = counts.get(homes[shard], 0) + 1
        return "; ".join(f"{count} shards from {self._name(home)}" for home, count in counts.items())

    def _name(self, server: str) -> str:
        link = self._links.get(server)
        if link is None:
            return f"server {server}"
        member = link.server
        return f"server {server} on {member.host} ({member.address}{', ' + link.trouble if link.trouble else ''})"
