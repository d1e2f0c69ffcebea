"""Which workers answer for a cache of the data set, and what the coordinator tells each of them of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from rallypoint.core.protocol import Caches, Holder, Offers
from rallypoint.core.view import View
from rallypoint.net.handshake import ticket_for
from rallypoint.observe.lines import Allowance

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
