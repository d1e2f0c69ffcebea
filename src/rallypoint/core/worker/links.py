"""A worker's links to servers, which of them are up, and the route of its contributions and versions.

The route is through the aggregator that the view gives the worker, or straight to the servers:

    direct -> through   a step begins (nothing of it was sent), and the link to the aggregator is up
    through -> direct   that link is lost, at once: what was sent of the step in progress is computed and sent again

A worker keeps its links to all servers in either case, so it waits for nobody when it loses its aggregator. First
weights, states and rows go straight to the servers always. The machine does not know of routes: it gets a view in which
the aggregator is the primary of every shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from rallypoint.core.view import Member, View
from rallypoint.core.worker.slots import Effect, Follow

_LONGEST_REST = 64  # steps


class LinkTable:
    """The links of worker `me` to servers, and to its aggregator, which counts as a server here.

    `connections`: server id -> connection number, for the links that are up. A link that is opened again has a new
    number.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self.connections: dict[str, int] = {}
        self._links: dict[str, Member] = {}  # all open links, up or not
        self._connected = 0

    @property
    def servers(self) -> list[str]:
        """The servers to which there are links, up or not."""
        return list(self._links)

    def to_end(self, before: View | None, view: View, *, between: bool = False) -> list[str]:
        """The servers whose links have to end before `view` counts; `before` is the view in force.

        These are servers that were replaced, and servers that lost a shard (they may still be sending it while its new
        primary sends it too), also if they have it again. `between`: shards move between two steps, and nothing is on
        its way; then these links stay. In a new generation it is all of them: what they are sending is stale.
        """
        if before is not None and before.generation != view.generation:
            return self.servers
        losing = set() if before is None or between else {before.primary[shard] for shard in view.moved(before)}
        wanted = self._wanted(view)
        return [id for id, member in self._links.items() if id in losing or member not in wanted]

    def to_open(self, view: View) -> list[Member]:
        """The servers of `view` to open a link to. Each is returned once: from then on it counts as linked."""
        new = [member for member in self._wanted(view) if member.id not in self._links]
        self._links |= {member.id: member for member in new}
        return new

    def _wanted(self, view: View) -> tuple[Member, ...]:
        aggregator = view.aggregator(self._me)
        return view.servers if aggregator is None else (*view.servers, aggregator)

    def end(self, server: str) -> None:
        """Drop the link: it has ended and will not be opened again."""
        del self._links[server]

    def up(self, server: str) -> bool:
        """The link is up (again). Returns False, and does nothing, if the link was ended meanwhile."""
        if server not in self._links:
            return False
        self._connected += 1
        self.connections[server] = self._connected
        return True

    def lost(self, server: str) -> None:
        """The link is down; it may come up again."""
        self.connections.pop(server, None)

    def validate(self, view: View | None) -> None:
        """Raise AssertionError with a sentence if there are links to servers that are not in the view."""
        servers = set(self._wanted(view)) if view is not None else set()
        strangers = {member.id for member in self._links.values() if member not in servers}
        assert not strangers, f"links to {strangers}, which are not in the view"
        assert self.connections.keys() <= self._links.keys(), f"{set(self.connections) - set(self._links)} not linked"
        assert len(set(self.connections.values())) == len(self.connections), "two connections have one number"

    def follow(self, view: View, *, on: bool) -> list[Effect]:
        """Follow each server of `view` that is linked, or (`on=False`) follow it no more."""
        linked = sorted(self.connections.keys() & {server.id for server in view.servers})
        return [Follow(server, on) for server in linked]


@dataclass(slots=True)
class Route:
    """The route of worker `me`. `through`: the id of the aggregator in use; "" while it uses the servers.

    A worker that has lost its aggregator goes back to the same process after 2, 4, 8, ... steps.
    """

    me: str
    through: str = ""
    _member: Member | None = None  # the aggregator that the view gives it
    _losses: int = 0
    _rest: int = 0

    def adopt(self, view: View) -> None:
        """A view is in force. The link to an aggregator that it does not give this worker has ended already."""
        member = view.aggregator(self.me)
        if member != self._member:
            self._member, self._losses, self._rest = member, 0, 0

    @property
    def aggregator(self) -> str:
        """The id of the aggregator that the view gives this worker; "" if it gives none."""
        return "" if self._member is None else self._member.id

    def leave(self, *, broken: bool) -> None:
        """Use the servers from now on. `broken`: the link to the aggregator broke, and was not ended from here."""
        self.through = ""
        if broken:
            self._losses += 1
            self._rest = min(1 << self._losses, _LONGEST_REST)

    def step_begins(self) -> bool:
        """A step begins. Returns True if it may go through the aggregator, once the link to that is up."""
        if self._rest:
            self._rest -= 1
        return self._member is not None and not self.through and not self._rest

    def takes_from(self, server: str) -> bool:
        """True if versions that come from this server (or aggregator) belong into this worker's slots."""
        return server == self.through if self.through else server != self.aggregator

    def seen(self, view: View) -> View:
        """`view` as the machine gets it: the aggregator in use is the primary of every shard."""
        if not self.through:
            return view
        assert self._member is not None
        return msgspec.structs.replace(
            view, servers=(*view.servers, self._member), primary=dict.fromkeys(view.primary, self.through),
            backup={}, paired={}, homed={},
        )  # fmt: skip

    def only_on_it(self, effects: Iterable[Effect], step: int) -> list[Effect]:
        """`effects` without requests to follow servers that are not on the route; `step`: see `Follow`."""
        if not self.through:
            return list(effects)
        on_it = (e for e in effects if not isinstance(e, Follow) or e.server == self.through)
        return [replace(effect, step=max(0, step)) if isinstance(effect, Follow) else effect for effect in on_it]
