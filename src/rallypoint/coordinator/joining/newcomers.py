"""Processes that come under the name of a member that is expected to come back.

After a coordinator's restart, or a broken link, a member is away for a moment. Whoever knows the token could be faster
than it and take its name; its shards would be lost with it. So a newcomer waits until the member is back (then it is
refused) or has been given up.

Each process that joins under a new name costs a view, a write to the journal and some lines. Who knows the token can be
ever new ones: beyond a number that no honest cluster comes to, they are let in one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.coordinator import inbox
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Hello
from rallypoint.observe.lines import Allowance

_JOINS, _JOINS_EACH, _JOIN_S = 1024, 4, 0.25  # so many may join, and more for each member wanted; then one each 0.25 s


@dataclass(slots=True)
class Newcomers:
    """Keeps at most one newcomer for each name, and lets no more than `joins` allows join."""

    joins: Allowance
    _waiting: dict[str, inbox.Opened] = field(default_factory=dict)
    _crowd: dict[str, inbox.Opened] = field(default_factory=dict)
    _told: bool = False

    @classmethod
    def of(cls, terms: Terms, now: float) -> Newcomers:
        """Those of a job with these terms."""
        wanted = terms.workers_max + terms.servers + terms.aggregators
        return cls(Allowance(_JOINS + _JOINS_EACH * wanted, _JOIN_S, now))

    def keeps(self, opened: inbox.Opened, members: Membership, now: float) -> str | None:
        """What to tell, if this process has to wait; None if it need not.

        It has to if its name is that of a member that is expected back, and it is not that one; or if too many join.
        """
        hello = opened.hello
        if _must_wait(hello, members):
            self._waiting[hello.id] = opened
            return f"another process has come as {hello.id}: it waits until {hello.id} is back, or is given up"
        if members.same(hello.id, hello.role, hello.incarnation, hello.process) is not None or self.joins.take(now):
            return None
        self._crowd[hello.id] = opened
        first, self._told = not self._told, True
        return "more processes join than a job needs: they are let in one after another" if first else ""

    @property
    def names(self) -> frozenset[str]:
        """The names of members that are expected back, under which other processes wait."""
        return frozenset(self._waiting)

    def waits_for(self, id: str) -> bool:
        """True if a process waits for this name, or under it."""
        return id in self._waiting or id in self._crowd

    def allowed(self, now: float) -> list[inbox.Opened]:
        """Take out those of a crowd that may join now."""
        return [self._crowd.pop(id) for id in list(self._crowd)[: self.joins.left(now)]]

    def due(self, members: Membership) -> list[inbox.Opened]:
        """Take out those that have to wait no longer."""
        ids = [id for id, opened in self._waiting.items() if not _must_wait(opened.hello, members)]
        return [self._waiting.pop(id) for id in ids]

    def take_all(self) -> list[inbox.Opened]:
        """Take out all: the job has ended."""
        waiting = [*self._waiting.values(), *self._crowd.values()]
        self._waiting, self._crowd = {}, {}
        return waiting

    def closed(self, closed: inbox.Closed) -> None:
        """A connection ended: if it was one that waited, forget it."""
        for waiting in (self._waiting, self._crowd):
            opened = waiting.get(closed.hello.id)
            if opened is not None and opened.connection == closed.connection:
                del waiting[closed.hello.id]


def _must_wait(hello: Hello, members: Membership) -> bool:
    is_it = members.same(hello.id, hello.role, hello.incarnation, hello.process) is not None
    return hello.id in members.awaited and not is_it


def taken(id: str) -> str:
    """The sentence with which a second process of this id is refused."""
    return f"the id {id} is taken: give every member one of its own"
