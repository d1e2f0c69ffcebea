"""The secrets and tickets that the coordinator gives to members, and its proofs of the views that it writes.

`net.keys` says what they are.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence

import msgspec

from rallypoint.core.view import View
from rallypoint.net.keys import proof_of_view, ticket
from rallypoint.net.messages import Admitted, Knows, NewView


class Tickets:
    """Computes them from the coordinator's secret, so a restarted coordinator gives the same ones again."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def admitted(self, id: str, incarnation: int, role: str) -> Admitted:
        """The message that admits this member."""
        return Admitted(incarnation, ticket(self._secret, role, id, incarnation))

    def views(self, view: View, members: Sequence[str]) -> Iterator[tuple[str, NewView]]:
        """The view for each of these members, with the member's tickets for the view's servers.

        A worker gets one for its aggregator too. Who is not in the view has none: no server would listen to it.
        """
        here = {
            one.id: (role, one.incarnation)
            for role, ones in (("server", view.servers), ("aggregator", view.aggregators), ("worker", view.workers))
            for one in ones
        }
        listening = {id: who for id, who in here.items() if who[0] != "worker"}
        proof = self.proof(view)
        secrets = {id: ticket(self._secret, role, id, number) for id, (role, number) in listening.items()}
        for id in members:
            who, through = here.get(id), view.aggregator_of.get(id, "")
            listeners = [s for s in secrets if s != id and (here[s][0] == "server" or s == through)]
            known = {} if who is None else {s: ticket(secrets[s], who[0], id, who[1]) for s in listeners}
            yield id, NewView(view, known, proof)

    def proof(self, view: View) -> bytes:
        """The proof that a coordinator of this job has written `view`."""
        return proof_of_view(self._secret, msgspec.msgpack.encode(view))

    def proven(self, knows: Knows) -> Knows:
        """What counts of it: nothing, if no coordinator of this job has written that view."""
        written = knows.view is not None and hmac.compare_digest(self.proof(knows.view), knows.proof)
        return knows if written else Knows()
