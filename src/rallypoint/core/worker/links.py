"""Which links a worker has to servers, and which of them stand."""

from __future__ import annotations

from rallypoint.core.view import Member, View


class LinkTable:
    """`connections` are the links that stand, each with a number of its own: one made again has a new number."""

    def __init__(self) -> None:
        self.connections: dict[str, int] = {}
        self._links: dict[str, Member] = {}  # those that were made, whether they stand or not
        self._connected = 0

    def to_end(self, before: View | None, view: View) -> list[str]:
        """The servers whose links end with this view.

        They are those that were replaced, and those that shards have moved away from (they might still be sending one
        that its new home sends too). After a roll-back it is all of them: what they are sending is stale.
        """
        if before is not None and before.generation != view.generation:
            return list(self._links)
        homes = {} if before is None else before.primary
        losing = {home for shard, home in homes.items() if view.primary.get(shard) != home}
        return [id for id, member in self._links.items() if id in losing or member not in view.servers]

    def to_open(self, view: View) -> list[Member]:
        """The servers of the view without a link; from now on they count as linked to."""
        new = [member for member in view.servers if member.id not in self._links]
        self._links |= {member.id: member for member in new}
        return new

    def end(self, server: str) -> None:
        """The link has ended for good."""
        del self._links[server]

    def up(self, server: str) -> bool:
        """The link stands (again); False if there is to be none any more."""
        if server not in self._links:
            return False
        self._connected += 1
        self.connections[server] = self._connected
        return True

    def lost(self, server: str) -> None:
        """The link does not stand any more; it may be made again."""
        self.connections.pop(server, None)

    def validate(self, view: View | None) -> None:
        """AssertionError, with a sentence, if there are links to servers that are not in the view."""
        servers = set(view.servers) if view is not None else set()
        strangers = {member.id for member in self._links.values() if member not in servers}
        assert not strangers, f"links to {strangers}, which are not in the view"
        assert self.connections.keys() <= self._links.keys(), f"{set(self.connections) - set(self._links)} not linked"
        assert len(set(self.connections.values())) == len(self.connections), "two connections have one number"
