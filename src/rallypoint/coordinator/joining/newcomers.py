"""Processes that come under the name of a member that is expected to come back.

After a coordinator's restart, or a broken link, a member is away for a moment. Whoever knows the token could be faster
than it and take its name; its shards would be lost with it. So a newcomer waits until the member is back (then it is
refused) or has been given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.coordinator import inbox
from rallypoint.core.cluster.membership import Membership
from rallypoint.net.messages import Hello


@dataclass(slots=True)
class Newcomers:
    """Keeps at most one newcomer for each name."""

    _waiting: dict[str, inbox.Opened] = field(default_factory=dict)

    def keeps(self, opened: inbox.Opened, members: Membership) -> bool:
        """True if this process has to wait: its name is that of a member that is expected back, and it is not that one.
        """
        if not _must_wait(opened.hello, members):
            return False
        self._waiting[opened.hello.id] = opened
        return True

    def waits_for(self, id: str) -> bool:
        """True if a process waits for this name."""
        return id in self._waiting

    def due(self, members: Membership) -> list[inbox.Opened]:
        """Take out those that have to wait no longer."""
        ids = [id for id, opened in self._waiting.items() if not _must_wait(opened.hello, members)]
        return [self._waiting.pop(id) for id in ids]

    def take_all(self) -> list[inbox.Opened]:
        """Take out all: the job has ended."""
        waiting, self._waiting = list(self._waiting.values()), {}
        return waiting

    def closed(self, closed: inbox.Closed) -> None:
        """A connection ended: if it was one that waited, forget it."""
        waiting = self._waiting.get(closed.hello.id)
        if waiting is not None and waiting.connection == closed.connection:
            del self._waiting[closed.hello.id]


def _must_wait(hello: Hello, members: Membership) -> bool:
    is_it = members.same(hello.id, hello.role, hello.incarnation, hello.process) is not None
    return hello.id in members.awaited and not is_it


def taken(id: str) -> str:
    """The sentence with which a second process of this id is refused."""
    return f"the id {id} is taken: give every member one of its own"
