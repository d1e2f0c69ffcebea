"""A worker's links to servers, and which of them are up."""

from __future__ import annotations

from rallypoint.core.view import Member, View


class LinkTable:
    """The links to servers. `connections`: server id -> connection number, for the links that are up.

    A link that is opened again has a new number.
    """

    def __init__(self) -> None:
        self.connections: dict[str, int] = {}
        self._links: dict[str, Member] = {}  # all open links, up or not
        self._connected = 0

    @property
    def servers(self) -> list[str]:
        """The servers to which there are links, up or not."""
        return list(self._links)

    def to_end(self, before: View | None, view: View) -> list[str]:
        """The servers whose links have to end before `view` counts; `before` is the view in force.

        These are servers that were replaced, and servers that lost a shard (they may still be sending it while its new
        primary sends it too), also if they have it again. In a new generation it is all of them: what they are sending
        is stale.
        """
        if before is not None and before.generation != view.generation:
            return self.servers
        losing = set() if before is None else {before.primary[shard] for shard in view.moved(before)}
        return [id for id, member in self._links.items() if id in losing or member not in view.servers]

    def to_open(self, view: View) -> list[Member]:
        """The servers of `view` to open a link to. Each is returned once: from then on it counts as linked."""
        new = [member for member in view.servers if member.id not in self._links]
        self._links |= {member.id: member for member in new}
        return new

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
        servers = set(view.servers) if view is not None else set()
        strangers = {member.id for member in self._links.values() if member not in servers}
        assert not strangers, f"links to {strangers}, which are not in the view"
        assert self.connections.keys() <= self._links.keys(), f"{set(self.connections) - set(self._links)} not linked"
        assert len(set(self.connections.values())) == len(self.connections), "two connections have one number"
