"""Offers this host's cache to the job's other hosts, and tells this worker's processes whom to ask."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from rallypoint.data.files import File, StoredFiles
from rallypoint.data.peers import Asking, Known, PeerAnswers, Roster
from rallypoint.data.shards import ShardedDataset
from rallypoint.errors import RallypointError
from rallypoint.net.member import CoordinatorLink
from rallypoint.net.messages import Caches, Message, Offers
from rallypoint.net.places import advertised
from rallypoint.net.tcp import is_ipv6, split_address
from rallypoint.net.transport import Transport

log = logging.getLogger("rallypoint")

TOLD_WITHIN_S = 2.0  # so long the first step waits to hear of other hosts' caches


class Sharing:
    """Does nothing until `begin` finds a data set with a cache. `takes` and `repeat` are for the link's thread."""

    def __init__(self, transport: Transport, link: CoordinatorLink) -> None:
        self._transport, self._link = transport, link
        self._lock, self._told = threading.Lock(), threading.Event()
        self._answering: PeerAnswers | None = None
        self._asking: Asking | None = None
        self._roster: Roster | None = None
        self._offers: Offers | None = None
        self._known = Caches(())

    def begin(self, dataset: object) -> None:
        """Share the cache of a data set, if it has one. Call it before loader processes are forked."""
        sources = list(_sources(dataset))
        cache = next((files.cache for files, _ in sources if files.cache is not None and files.cache.peers), None)
        if cache is None:
            return
        of_cache = [one for one in sources if one[0].cache is not None and one[0].cache.id == cache.id]
        try:
            bind = _bind(self._transport, self._link.peer)
            answering = PeerAnswers(self._transport, bind, self._link.credentials.me, cache, of_cache)
            try:
                address = advertised(answering.gate.address, towards=self._link.peer)
            except BaseException:
                answering.close()
                raise
        except (RallypointError, OSError) as error:
            log.warning("other hosts cannot ask this one for what its cache has, nor it them: %s", error)
            return
        roster = Roster()
        asking = Asking(self._transport, roster, cache.id)
        with self._lock:
            self._answering, self._roster, self._asking = answering, roster, asking
            self._offers = Offers(address, cache.id)
        for files, _ in of_cache:
            assert files.cache is not None
            files.cache.join(asking.ask)
        self.repeat()
        self._told.wait(TOLD_WITHIN_S)  # else what is read first would be fetched by each host

    def repeat(self) -> None:
        """The coordinator has admitted this worker, perhaps as another incarnation."""
        with self._lock:
            if self._answering is None or self._offers is None:
                return
            self._answering.gate.me = self._link.credentials.me
            self._link.send(self._offers)

    def takes(self, message: Message) -> bool:
        """True if the message is for it."""
        if not isinstance(message, Caches):
            return False
        with self._lock:
            if self._roster is not None and self._offers is not None:
                me = self._link.credentials.me
                self._known = message.after(self._known)
                self._roster.tell(Known(me.id, me.incarnation, self._offers.address, self._known))
        self._told.set()
        return True

    def close(self) -> None:
        """Neither ask nor answer any more."""
        with self._lock:
            answering, asking = self._answering, self._asking
        for one in (asking, answering):
            if one is not None:
                one.close()


def _sources(dataset: Any) -> Iterator[tuple[StoredFiles, list[File]]]:
    """Where a data set reads, or the data sets that it is made of (`Subset`, `ConcatDataset`)."""
    if isinstance(dataset, ShardedDataset):
        yield dataset.source
    else:
        parts = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
        for part in parts if isinstance(parts, (list, tuple)) else ():
            if part is not None:
                yield from _sources(part)


def _bind(transport: Transport, coordinator: str) -> str:
    """Where to listen: on this machine alone if the coordinator is on it, and its address says so."""
    if transport.private(coordinator):
        return "127.0.0.1:0"
    return "[::]:0" if is_ipv6(split_address(coordinator)[0]) else "0.0.0.0:0"
