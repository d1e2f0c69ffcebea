"""A cache on this machine's disk, for what is read from stores: one for all processes of the machine."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.data.cache.entries import Entries
from rallypoint.errors import UsageError

log = logging.getLogger("rallypoint")

LIMIT = 64 << 30
WAIT_S = 60.0  # for another process that fetches the same bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of one file of a store.

    Attributes:
        file: a digest of the file's URL, size and mark: that of a file that was written again is another one.
        start: the first byte.
        stop: the byte after the last one.
    """

    file: bytes
    start: int
    stop: int

    @property
    def name(self) -> str:
        """A name that no other piece has."""
        range_ = self.start.to_bytes(8, "little") + self.stop.to_bytes(8, "little")
        return hashlib.blake2b(self.file + range_, digest_size=16).hexdigest()


Ask = Callable[[Piece, Callable[[], bytes]], bytes | None]  # see `asking.Asking.ask`


class Cache:
    """Keeps what is read from a store: ``rp.Parquet("s3://...", cache=rp.Cache("/scratch/data", limit=500 << 30))``.

    All processes of the machine that name the same folder share it: workers, their loader processes, later runs. What
    two of them need at once is fetched by one. A file that was written again in the store, as its size, its time or its
    ETag tells, is another one. Bytes that were damaged on the disk are noticed, and fetched again. A disk that is full
    or fails costs the cache, and no sample. The system keeps what was read last in memory, once for all processes.

    In a job the hosts fetch from each other first, so that each piece leaves the store about once: see `peers`.

    Arguments:
        folder: on a disk of this machine. Who may write into it decides what is read.
        limit: bytes that are kept; what was used longest ago goes first.
        peers: also ask the other hosts of the job, and answer them.

    It may be pickled, and used after a fork.
    """

    def __init__(self, folder: str | Path, *, limit: int = LIMIT, peers: bool = True) -> None:
        if "://" in str(folder):
            raise UsageError(f"rp.Cache({str(folder)!r}): give a folder on a disk of this machine")
        if not isinstance(limit, int | float) or not 1 <= limit < math.inf:
            raise UsageError(f"rp.Cache(limit={limit!r}): give a number of bytes, 1 or more, as 500 << 30 for 500 GiB")
        self.peers = peers
        self._entries = Entries(Path(folder).expanduser().absolute(), limit)
        self._ask: Ask | None = None
        self._failed = False
        try:
            self.id = self._entries.prepare()
        except OSError as error:
            raise UsageError(f"rp.Cache({str(folder)!r}): {error}") from error

    def __repr__(self) -> str:
        return f"Cache({str(self._entries.folder)!r}, limit={self._entries.limit}, peers={self.peers})"

    @property
    def limit(self) -> int:
        """How many bytes of the disk it takes at most."""
        return int(self._entries.limit)

    @property
    def total(self) -> int:
        """How many bytes of the disk it takes now."""
        return self._entries.total

    def join(self, ask: Ask) -> None:
        """From now on, ask the caches of other hosts first."""
        self._ask = ask if self.peers else None

    def get(self, piece: Piece, fetch: Callable[[], bytes]) -> bytes:
        """Return the bytes of a piece: those that are kept, a neighbour's, or what `fetch` returns from the store."""
        ask = self._ask
        if ask is None:
            return self.serve(piece, fetch)
        if (found := self._read(piece.name)) is not None:
            return found
        with self._asking(piece.name):
            if (found := self._read(piece.name)) is not None:
                return found
            asked = ask(piece, fetch)
            return self.serve(piece, fetch if asked is None else lambda: asked)

    def has(self, piece: Piece) -> bool:
        """True if a piece is kept now. It may be damaged, or gone when it is needed."""
        return self._entries.has(piece.name)

    def serve(self, piece: Piece, fetch: Callable[[], bytes]) -> bytes:
        """The same for a neighbour that asks: nobody else is asked."""
        name = piece.name
        if (found := self._read(name)) is not None:
            return found
        fetched: bytes | None = None
        try:
            with self._entries.locked(name, WAIT_S) as alone:
                if (found := self._read(name)) is not None:
                    return found
                if not alone:
                    log.warning("another process has fetched a piece for %g s: it is fetched here too", WAIT_S)
                fetched = fetch()
                if alone and not self._failed:
                    self._entries.keep(name, fetched)
        except OSError as error:  # of the disk: stores' errors are DataErrors
            self._fail(error)
        return fetch() if fetched is None else fetched

    def _read(self, name: str) -> bytes | None:
        try:
            return self._entries.read(name)
        except OSError as error:
            self._fail(error)
            return None

    def _fail(self, error: OSError) -> None:
        """Say it once in each process. What is kept is still read; nothing more is kept by this process."""
        if not self._failed:
            self._failed = True
            folder = self._entries.folder
            log.warning("process %d keeps nothing more in the cache %s: %s", os.getpid(), folder, error)

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """One process of the machine asks for a piece. These are no locks that `serve` needs: else two hosts that ask
        each other could each wait for the other."""
        with ExitStack() as held:
            try:
                held.enter_context(self._entries.locked(name, WAIT_S, "asks-"))
            except OSError as error:
                self._fail(error)
            yield

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ask": None}  # a process that is not forked asks the store


def cache_of(given: Cache | str | Path | None) -> Cache | None:
    """Return the cache that `cache=` of a data set means: a folder is one with the defaults."""
    return Cache(given) if isinstance(given, (str, Path)) else given
