"""The way of a worker's contributions and versions: through the aggregator that the view gives it, or to the servers.

    direct -> through   a step begins (nothing of it was sent), and the link to the aggregator is up
    through -> direct   that link is lost, at once: what was sent of the step in progress is computed and sent again

A worker keeps its links to all servers in either case, so it waits for nobody when it loses its aggregator. First
weights, states and rows go straight to the servers always. The machine does not know of routes: it gets a view in which
the aggregator is the primary of every shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rallypoint.core.view import Member, View

_LONGEST_REST = 64  # steps


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

    def lost(self) -> None:
        """The link to the aggregator in use is lost."""
        self.through = ""
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
