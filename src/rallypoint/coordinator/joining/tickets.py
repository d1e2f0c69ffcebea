"""The secrets and tickets that the coordinator gives to members, and its proofs of the views that it writes.

`net.keys` says what they are.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from rallypoint.core.view import View
from rallypoint.net.keys import proof_of_view, ticket
from rallypoint.net.messages import Admitted, Knows, NewView
from rallypoint.net.sharing.messages import Caches, Holder, Offers

MOST_OF_ONE_CACHE = 2  # workers that are named for it


class Tickets:
    """Computes them from the coordinator's secret, so a restarted coordinator gives the same ones again."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._offers: dict[str, tuple[int, Offers]] = {}  # of workers: the incarnation that said it
        self._told: dict[str, dict[str, Holder]] = {}  # to each of them: whom it was told of

    def admitted(self, id: str, incarnation: int, role: str) -> Admitted:
        """The message that admits this member."""
        return Admitted(incarnation, ticket(self._secret, role, id, incarnation))

    def views(self, view: View, members: Sequence[str]) -> Iterator[tuple[str, NewView | Caches]]:
        """The view for each of these members, with the member's tickets for the view's servers; then `caches`.

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
        yield from self.caches(view)

    def offered(self, worker: str, offers: Offers, view: View | None) -> Iterator[tuple[str, Caches]]:
        """A worker answers for a cache: what to tell those who do."""
        if view is None or (here := next((one for one in view.workers if one.id == worker), None)) is None:
            return
        self._offers[worker] = here.incarnation, offers
        self._told.pop(worker, None)  # what was on its way to it may be lost: it hears all, and others what is new
        yield from self.caches(view)

    def caches(self, view: View) -> Iterator[tuple[str, Caches]]:
        """For each worker that answers for a cache: all that do, with its tickets for them; later, what has changed.

        So N workers that begin at once cost N^2 tickets together, and not N of them N times.
        """
        here = {one.id: one.incarnation for one in view.workers}
        self._offers = {id: (number, told) for id, (number, told) in self._offers.items() if here.get(id) == number}
        named, of_cache = list[Holder](), Counter[str]()
        for id, (number, told) in sorted(self._offers.items()):
            of_cache[told.cache] += 1
            if of_cache[told.cache] <= MOST_OF_ONE_CACHE:
                named.append(Holder(id, number, told.address, told.cache))
        secrets = {one.id: ticket(self._secret, "worker", one.id, one.incarnation) for one in named}
        now = {one.id: one for one in named}
        self._told = {id: told for id, told in self._told.items() if id in self._offers}
        for id, (number, _) in self._offers.items():
            before, self._told[id] = self._told.get(id), now
            new = [one for one in named if before is None or before.get(one.id) != one]
            gone = () if before is None else tuple(sorted(before.keys() - now.keys()))
            if before is None or new or gone:
                tickets = {one.id: ticket(secrets[one.id], "worker", id, number) for one in new if one.id != id}
                yield id, Caches(tuple(new), tickets, before is not None, gone)

    def proof(self, view: View) -> bytes:
        """The proof that a coordinator of this job has written `view`."""
        return proof_of_view(self._secret, msgspec.msgpack.encode(view))

    def proven(self, knows: Knows) -> Knows:
        """What counts of it: nothing, if no coordinator of this job has written that view."""
        written = knows.view is not None and hmac.compare_digest(self.proof(knows.view), knows.proof)
        return knows if written else Knows()
