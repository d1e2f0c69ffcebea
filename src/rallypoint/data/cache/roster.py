"""Who answers for the caches of a job: told by the worker, read by it and by the processes that it has forked."""

from __future__ import annotations

import mmap

import msgspec
import xxhash

from rallypoint.core.placement import ranking
from rallypoint.core.typed import build_now
from rallypoint.net.messages import Caches, Holder

ROOM = 4 << 20  # bytes; none of it is memory before it is used
_HEAD = 12  # the length, 4 bytes; a checksum, 8 bytes


class Known(msgspec.Struct, frozen=True):
    """What a worker knows: who it is itself, and who answers for a cache."""

    id: str
    incarnation: int
    host: str
    caches: Caches

    def order(self, name: str) -> list[Holder]:
        """Return the holders in the order in which their caches are to have the piece of this name.

        It is the same on all hosts (rendezvous hashing), and few pieces change their place when hosts come and go.
        """
        of_cache: dict[str, list[Holder]] = {}
        for holder in sorted(self.caches.holders, key=lambda one: one.id):
            of_cache.setdefault(holder.cache, []).append(holder)
        return [holder for cache in ranking(name, list(of_cache)) for holder in of_cache[cache]]


build_now(Known)


class Roster:
    """Memory that a process shares with those that it forks later. One thread writes; any may read."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ROOM)
        self._seen: tuple[bytes, Known | None] = b"", None

    def tell(self, known: Known) -> None:
        """Replace what is known. If it is too much, nothing changes: fewer hosts are asked then."""
        data = msgspec.msgpack.encode(known)
        if _HEAD + len(data) <= ROOM:
            head = len(data).to_bytes(4, "little") + xxhash.xxh3_64_digest(data)
            self._memory[: _HEAD + len(data)] = head + data

    def read(self) -> Known | None:
        """Return what is known; None before anything is. While it is being written: what was known before."""
        head = bytes(self._memory[:_HEAD])
        if head == self._seen[0]:
            return self._seen[1]
        data = bytes(self._memory[_HEAD : _HEAD + min(int.from_bytes(head[:4], "little"), ROOM)])
        if data and xxhash.xxh3_64_digest(data) == head[4:]:
            self._seen = head, msgspec.msgpack.decode(data, type=Known)
        return self._seen[1]

    def close(self) -> None:
        """Forget it all."""
        self._memory[:_HEAD] = bytes(_HEAD)
        self._seen = b"", None
