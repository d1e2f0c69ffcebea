"""Places shards on servers whose links are not alike: each gets bytes in proportion to its weight.

Each shard ranks the servers by weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash
tables", 2005: the score of a server of weight w is -w / ln(u), with u in (0, 1) a hash of server and shard) and takes
the first that has room. A server's room is its share of all bytes, and also of the bytes up to this shard: shards are
sent in the order of the layout, so a server must not have its share at one end of it alone.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rallypoint.core.layout import Shard


def place_weighted(
    shards: Sequence[Shard], weights: Mapping[str, float], previous: Mapping[int, str] | None = None
) -> dict[int, str]:
    """The primary of every shard: shard index -> server id. `weights`: above 0, of at least one server.

    Every server gets its share of the bytes, or up to the largest shard more. With `previous`, a shard stays where it
    was if that server has no more than that.
    """
    rooms = _Rooms(shards, weights)
    placed = rooms.kept(shards, previous or {})
    whole, loads = _loads(shards, placed), dict.fromkeys(weights, 0)
    before = 0
    for shard in shards:
        before += shard.nbytes
        if shard.index not in placed:
            home = rooms.home(shard, loads, whole, before)
            placed[shard.index] = home
            whole[home] += shard.nbytes
        loads[placed[shard.index]] += shard.nbytes
    return {shard.index: placed[shard.index] for shard in shards}


def weighted_ranking(shard: int, weights: Mapping[str, float]) -> list[str]:
    """All servers in the shard's order of preference."""
    return sorted(weights, key=lambda server: (weights[server] / -math.log(_uniform(shard, server)), server))[::-1]


class _Rooms:
    """Each server's share of the bytes, and the largest shard."""

    def __init__(self, shards: Sequence[Shard], weights: Mapping[str, float]) -> None:
        self._weights = weights
        everything = math.fsum(weights.values())
        self._share = {server: weight / everything for server, weight in weights.items()}
        self._total = sum(shard.nbytes for shard in shards)
        self._largest = max((shard.nbytes for shard in shards), default=0)

    def kept(self, shards: Sequence[Shard], previous: Mapping[int, str]) -> dict[int, str]:
        """The shards that stay: shard index -> server id. Who has too much keeps some of everywhere in the layout."""
        whole = _loads(shards, previous)
        loads, placed, before = dict.fromkeys(self._weights, 0), dict[int, str](), 0
        for shard in shards:
            before += shard.nbytes
            home = previous.get(shard.index, "")
            if home not in loads:
                continue
            fits = loads[home] + shard.nbytes <= self._share[home] * before + self._largest
            if fits or whole[home] <= self._share[home] * self._total + self._largest:
                placed[shard.index] = home
                loads[home] += shard.nbytes
        return placed

    def home(self, shard: Shard, loads: Mapping[str, int], whole: Mapping[str, int], before: int) -> str:
        """Where a shard goes. `loads`: what servers have of the `before` bytes up to this shard; `whole`: of all."""
        ranked = weighted_ranking(shard.index, self._weights)
        share, size = self._share, shard.nbytes
        free = [server for server in ranked if whole[server] + size <= share[server] * self._total]
        for server in free:
            if loads[server] + size <= share[server] * before + self._largest:
                return server
        least = [server for server in ranked if whole[server] <= share[server] * self._total]  # one is below its share
        return min(free or least or ranked, key=lambda server: (whole[server] + size) / self._weights[server])


def _loads(shards: Sequence[Shard], placed: Mapping[int, str]) -> Counter[str]:
    loads: Counter[str] = Counter()
    for shard in shards:
        if shard.index in placed:
            loads[placed[shard.index]] += shard.nbytes
    return loads


def _uniform(shard: int, server: str) -> float:
    """A number in (0, 1), the same in every process."""
    return _within(int.from_bytes(hashlib.blake2b(f"{server}/{shard}".encode(), digest_size=8).digest(), "big"))


def _within(bits: int) -> float:
    """64 bits as a number in (0, 1): never 0 or 1, as rounding all of them would give."""
    return ((bits >> 12) + 0.5) / 2.0**52
