"""The secrets and tickets that the coordinator gives to members, and its proofs of the views that it writes.

`net.handshake` says what they are.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from rallypoint.core.protocol import Admitted, Caches, Holder, Knows, NewView, Offers, OfViews, ViewChange
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.core.view_difference import ViewDifference, canonical, difference
from rallypoint.net.handshake import proof_of_view, ticket_for
from rallypoint.observe.lines import Allowance

# ---- Which workers answer for a cache of the data set, and what the coordinator tells each of them of the others ----


MOST_OF_ONE_CACHE = 2  # workers that are named for it
BURST, EVERY_S = 8, 10.0  # offers of one worker that are followed at once; then one in so many seconds


class Shared:
    """Offers of caches, and who was told of which.

    An offer costs work for each worker that has a cache, and whoever knows the token may say it as often as it likes.
    An honest worker says it when it begins, and when it has joined again. Of those that come faster the newest counts,
    later.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._offers: dict[str, tuple[int, Offers]] = {}  # of workers: the incarnation that said it
        self._named: dict[str, Holder] = {}  # of whom all were told who were told last
        self._told: dict[str, dict[str, Holder]] = {}  # to each worker: whom it was told of
        self._allowances: dict[str, Allowance] = {}
        self._waiting: dict[str, Offers] = {}

    def offered(self, worker: str, offers: Offers, view: View | None, now: float) -> Iterator[tuple[str, Caches]]:
        """A worker answers for a cache, at `now` (seconds): what to tell those who do; nothing while it has to wait."""
        if view is None or (here := next((one for one in view.workers if one.id == worker), None)) is None:
            return
        if not self._allowances.setdefault(worker, Allowance(BURST, EVERY_S, now)).take(now):
            self._waiting[worker] = offers
            return
        self._waiting.pop(worker, None)
        self._offers[worker] = here.incarnation, offers
        self._told.pop(worker, None)  # what was on its way to it may be lost: it hears all, and others what is new
        yield from self.caches(view)

    def late(self, view: View | None, now: float) -> Iterator[tuple[str, Caches]]:
        """Follow offers that had to wait, as far as they may be followed at `now`."""
        for worker in [one for one in self._waiting if self._allowances[one].left(now)]:
            yield from self.offered(worker, self._waiting.pop(worker), view, now)

    def caches(self, view: View) -> Iterator[tuple[str, Caches]]:
        """For each worker that answers for a cache: all that do, with its tickets for them; later, what has changed.

        So N workers that begin at once cost N^2 tickets together, and not N of them N times.
        """
        here = {one.id: one.incarnation for one in view.workers}
        self._offers = {id: (number, told) for id, (number, told) in self._offers.items() if here.get(id) == number}
        self._allowances = {id: one for id, one in self._allowances.items() if id in here}
        self._waiting = {id: one for id, one in self._waiting.items() if id in here}
        if (now := self._now_named()) != self._named:
            self._named = now
        now, all_, changes = self._named, _Change({}, self._named, self._secret), dict[int, tuple[object, _Change]]()
        told, self._told = self._told, dict.fromkeys(self._offers, now)
        for worker, (number, _) in self._offers.items():
            if (before := told.get(worker)) is None:
                yield worker, Caches(tuple(all_.new), all_.tickets(worker, number))
            elif before is not now:
                if id(before) not in changes:  # nearly all were told of the same ones
                    changes[id(before)] = before, _Change(before, now, self._secret)
                if (change := changes[id(before)][1]).new or change.gone:
                    yield worker, Caches(tuple(change.new), change.tickets(worker, number), True, change.gone)

    def _now_named(self) -> dict[str, Holder]:
        """Of each cache a few of the workers that answer for it."""
        named, of_cache = dict[str, Holder](), Counter[str]()
        for worker, (number, told) in sorted(self._offers.items()):
            of_cache[told.cache] += 1
            if of_cache[told.cache] <= MOST_OF_ONE_CACHE:
                named[worker] = Holder(worker, number, told.address, told.cache)
        return named


class _Change:
    """Who is new among those that are named, and who is gone."""

    def __init__(self, before: Mapping[str, Holder], now: Mapping[str, Holder], secret: bytes) -> None:
        self.new = [one for one in now.values() if before.get(one.id) != one]
        self.gone = tuple(sorted(before.keys() - now.keys()))
        self._secrets = {one.id: ticket_for(secret, "worker", one.id, one.incarnation) for one in self.new}

    def tickets(self, worker: str, incarnation: int) -> dict[str, bytes]:
        """This worker's tickets for those that are new."""
        return {
            id: ticket_for(secret, "worker", worker, incarnation)
            for id, secret in self._secrets.items() if id != worker
        }


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
