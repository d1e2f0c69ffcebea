"""The secrets and tickets that the coordinator gives to members, and its proofs of the views that it writes.

`net.handshake` says what they are.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from rallypoint.coordinator.joining.shared import Shared
from rallypoint.core.protocol import Admitted, Caches, Knows, NewView, Offers, OfViews, ViewChange
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.core.view_difference import ViewDifference, canonical, difference
from rallypoint.net.handshake import proof_of_view, ticket_for


class Tickets:
    """Computes them from the coordinator's secret, so a restarted coordinator gives the same ones again."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._sent: dict[str, View] = {}  # the last view that went over each member's connection
        self._shared = Shared(secret)

    def admitted(self, id: str, incarnation: int, role: str) -> Admitted:
        """The message that admits this member."""
        return Admitted(incarnation, ticket_for(self._secret, role, id, incarnation))

    def news(self, view: View, members: Sequence[str]) -> Iterator[tuple[str, OfViews | Caches]]:
        """`views`, for members that are connected, with what their connections have brought them until now."""
        view = canonical(view)
        yield from self.views(view, members, self._sent)
        here = {one.id for one in (*view.workers, *view.servers, *view.aggregators)}
        self._sent = {id: last for id, last in self._sent.items() if id in here} | dict.fromkeys(members, view)

    def connected_anew(self, id: str) -> None:
        """This member has another connection than before: what was sent over the former may be lost."""
        self._sent.pop(id, None)

    def views(
        self, view: View, members: Iterable[str], sent: Mapping[str, View] | None = None
    ) -> Iterator[tuple[str, OfViews | Caches]]:
        """The view for each of these members, with the member's tickets for the view's servers; then `Shared.caches`.

        `sent`: the last view that went to a member over the connection that it has now. It gets the difference to that,
        and tickets only for servers that are new. Both views must be `canonical`. A worker gets a ticket for its
        aggregator too. Who is not in the view has none: no server would listen to it.
        """
        proof, earlier = self.proof(view), {} if sent is None else sent
        secrets = {one.id: ticket_for(self._secret, role, one.id, one.incarnation) for role, one in _listening(view)}
        now, known = _Given(view), dict[ViewNumber, tuple[ViewDifference, _Given]]()
        for id in members:
            if (base := earlier.get(id)) is None:
                yield id, NewView(view, self._tickets_for(id, now, secrets), proof)
                continue
            if base.number not in known:
                known[base.number] = difference(base, view), _Given(base)
            change, before = known[base.number]
            yield id, ViewChange(change, self._tickets_for(id, now, secrets, before), proof)
        yield from self._shared.caches(view)

    def _tickets_for(
        self, id: str, now: _Given, secrets: Mapping[str, bytes], before: _Given | None = None
    ) -> dict[str, bytes]:
        """The tickets of this member, without those that it had `before`."""
        if (who := now.here.get(id)) is None:
            return {}
        had = before if before is not None and before.here.get(id) == who else None
        listeners = now.listeners(id) if had is None else now.new_listeners(id, had)
        return {one: ticket_for(secrets[one], who[0], id, who[1]) for one in listeners}

    def offered(self, worker: str, offers: Offers, view: View | None, now: float) -> Iterator[tuple[str, Caches]]:
        """A worker answers for a cache: what to tell those who do. See `Shared.offered`."""
        return self._shared.offered(worker, offers, view, now)

    def late(self, view: View | None, now: float) -> Iterator[tuple[str, Caches]]:
        """What to tell of offers that had to wait. See `Shared.late`."""
        return self._shared.late(view, now)

    def proof(self, view: View) -> bytes:
        """The proof that a coordinator of this job has written `view`."""
        return proof_of_view(self._secret, msgspec.msgpack.encode(canonical(view)))

    def proven(self, knows: Knows) -> Knows:
        """What counts of it: nothing, if no coordinator of this job has written that view."""
        written = knows.view is not None and hmac.compare_digest(self.proof(knows.view), knows.proof)
        return knows if written else Knows()


class _Given:
    """For whom members have tickets in one view.

    Attributes:
        here: member -> its role and incarnation.
        servers: those among them, with their incarnation.
    """

    def __init__(self, view: View) -> None:
        workers = {one.id: ("worker", one.incarnation) for one in view.workers}
        self.here = {**workers, **{one.id: (role, one.incarnation) for role, one in _listening(view)}}
        self.servers = {(one.id, one.incarnation) for one in view.servers}
        self._through = view.aggregator_of
        self._new: tuple[_Given, set[tuple[str, int]]] | None = None  # servers that are new after an earlier view

    def listeners(self, id: str) -> Iterator[str]:
        """For whom this member has a ticket."""
        yield from (server for server, _ in self.servers if server != id)
        if (through := self._through.get(id, id)) != id and through in self.here:
            yield through

    def new_listeners(self, id: str, before: _Given) -> Iterator[str]:
        """Those for whom it had none `before`, or whose place another process has taken."""
        if self._new is None or self._new[0] is not before:
            self._new = before, self.servers - before.servers
        yield from (server for server, _ in self._new[1] if server != id)
        through = self._through.get(id, id)
        had = before.here.get(through) if before._through.get(id) == through else None
        if through != id and through in self.here and self.here[through] != had:
            yield through


def _listening(view: View) -> Iterator[tuple[str, Member]]:
    """Servers and aggregators, each with its role."""
    yield from (("server", one) for one in view.servers)
    yield from (("aggregator", one) for one in view.aggregators)
