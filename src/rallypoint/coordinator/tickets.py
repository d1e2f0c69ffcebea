"""The secrets and tickets that the coordinator gives to members (`net.keys` says what they are)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rallypoint.core.view import Member, View
from rallypoint.net.keys import ticket
from rallypoint.net.messages import Admitted, NewView


class Tickets:
    """Computes them from the coordinator's secret, so a restarted coordinator gives the same ones again."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def admitted(self, id: str, incarnation: int, workers: Mapping[str, Member]) -> Admitted:
        """The message that admits this member. `workers` are the workers among the members."""
        role = "worker" if id in workers else "server"
        return Admitted(incarnation, ticket(self._secret, role, id, incarnation))

    def views(self, view: View, members: Sequence[str]) -> Iterator[tuple[str, NewView]]:
        """The view for each of these members, with the member's tickets for the view's servers.

        Who is not in the view has none: no server would listen to it.
        """
        secrets = {one.id: ticket(self._secret, "server", one.id, one.incarnation) for one in view.servers}
        here = {one.id: ("server", one.incarnation) for one in view.servers}
        here |= {one.id: ("worker", one.incarnation) for one in view.workers}
        for id in members:
            who = here.get(id)
            known = {} if who is None else {s: ticket(secrets[s], who[0], id, who[1]) for s in secrets if s != id}
            yield id, NewView(view, known)
