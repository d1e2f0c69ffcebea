"""Which hosts keep pieces of the data set, and what one asks another for. `data/cache/` uses them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from rallypoint.core.typed import MOST_MEMBERS, Count, Name
from rallypoint.net.greetings import AnyMessage, Hidden, Shown

MOST_PIECE = 64 << 20  # bytes that are asked for at once

Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
CacheName = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A worker that answers for a cache.

    Attributes:
        id, incarnation: the worker's.
        address: where it listens.
        cache: the cache's own name: workers of one host have the same.
    """

    id: Name
    incarnation: Count
    address: Name
    cache: CacheName


class Offers(AnyMessage, frozen=True):
    """From a worker to the coordinator: it answers for this cache, at this address."""

    address: Name
    cache: CacheName


class Caches(AnyMessage, frozen=True):
    """From the coordinator to a worker that answers for a cache: who else does, and its tickets for them.

    Attributes:
        holders: all who do; with `more`, only those that have come, or changed, since the message before.
        tickets: for these holders, by their ids.
        more: it changes what was told before, and does not replace it.
        gone: with `more`, the ids of those that no longer do.
    """

    holders: Annotated[tuple[Holder, ...], msgspec.Meta(max_length=MOST_MEMBERS)]
    tickets: dict[Name, Hidden] = msgspec.field(default_factory=dict)
    more: bool = False
    gone: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_MEMBERS)] = ()

    def after(self, before: Caches) -> Caches:
        """Return all that is known with this message, if it was `before`."""
        if not self.more:
            return self
        changed = {*self.gone, *(one.id for one in self.holders)}
        kept = tuple(one for one in before.holders if one.id not in changed)
        tickets = {id: ticket for id, ticket in before.tickets.items() if id not in changed}
        return Caches((*kept, *self.holders), {**tickets, **self.tickets})


class Wanted(AnyMessage, frozen=True):
    """From a worker, or one of its loader processes, to another worker: these bytes of a file of the data set."""

    file: Digest
    start: Count
    stop: Count


class Found(AnyMessage, frozen=True):
    """The answer: the next frame is the piece, with this checksum."""

    checksum: Digest


class NotFound(Shown, frozen=True):
    """The answer: it is not to be had here."""

    reason: str


OfSharing = Offers | Caches | Wanted | Found | NotFound
