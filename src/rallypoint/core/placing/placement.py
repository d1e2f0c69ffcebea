"""Places shards on servers: rendezvous hashing with bounded load; few shards move when servers come and go.

Each shard ranks the servers by a hash of (server, shard) (Thaler and Ravishankar, 1998) and is placed on the first
that still has room (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018). A server's room
is the even share in bytes, rounded up to a multiple of the largest shard: the fullest server sets the time of a step.

Shards are placed in runs, one on each server: a layer's shards are neighbours, they are sent at the same time, and the
next forward pass waits for all of them. Were they on few servers, these servers' links would carry them alone.

Where links are not alike, `place_weighted` places in proportion to them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import fsum

from rallypoint.core.layout import Shard

_TOLERATED = 1.25  # a server keeps its shards up to so many times its room when servers come or go: moves are slow


def place(
    shards: Sequence[Shard], servers: Sequence[str], previous: Mapping[int, str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> dict[int, str]:  # fmt: skip
    """The primary of every shard: shard index -> server id.

    With `previous`, a shard stays where it was if that server is among `servers` and at most a quarter over its room.
    `weights`: server id -> what its link can carry, in any unit; None or {}: all are alike. Raises ValueError when
    there is no server.
    """
    if not servers:
        raise ValueError("there is no server to place shards on")
    if weights:
        return place_weighted(shards, {server: weights[server] for server in servers}, previous)
    loads = dict.fromkeys(servers, 0)
    room = _room(shards, len(servers))
    placed: dict[int, str] = {}
    for shard in shards:
        home = (previous or {}).get(shard.index)
        if home in loads and loads[home] + shard.nbytes <= max(room, int(room * _TOLERATED)):
            placed[shard.index] = home
            loads[home] += shard.nbytes
    for first in range(0, len(shards), len(servers)):
        run = shards[first : first + len(servers)]
        beside = {placed[shard.index] for shard in run if shard.index in placed}
        for shard in run:
            if shard.index not in placed:
                home = _first_with_room(shard, loads, room, beside)
                beside.add(home)
                placed[shard.index] = home
                loads[home] += shard.nbytes
    return {shard.index: placed[shard.index] for shard in shards}


def place_backups(
    shards: Sequence[Shard], servers: Sequence[str], primary: Mapping[int, str],
    previous: Mapping[int, str] | None = None, hosts: Mapping[str, str] | None = None,
    racks: Mapping[str, str] | None = None, weights: Mapping[str, float] | None = None,
) -> dict[int, str]:  # fmt: skip
    """The backup of every shard (shard index -> server id), on another server than its primary; {} if there is none.

    It is on another host too if there is one (`hosts`: server id -> host), and in another rack (`racks`: server id ->
    rack; "": not known). With `previous`, a backup stays where it was if that server is among `servers` and is not the
    primary. `weights`: see `place`.
    """
    if len(servers) < 2:
        return {}
    loads = dict.fromkeys(servers, 0)
    room = _room(shards, len(servers))
    total = sum(shard.nbytes for shard in shards)
    weighed = {server: weights[server] for server in servers} if weights else {}
    placed: dict[int, str] = {}
    for shard in shards:
        home = (previous or {}).get(shard.index)
        if home in loads and home != primary[shard.index]:
            placed[shard.index] = home
            loads[home] += shard.nbytes
    for shard in shards:
        if shard.index not in placed:
            others = _elsewhere(servers, primary[shard.index], hosts, racks)
            if weighed:
                home = _first_with_share(shard, others, loads, weighed, total)
            else:
                home = _first_with_room(shard, {server: loads[server] for server in others}, room)
            placed[shard.index] = home
            loads[home] += shard.nbytes
    return {shard.index: placed[shard.index] for shard in shards}


def _room(shards: Sequence[Shard], servers: int) -> int:
    largest = max((shard.nbytes for shard in shards), default=1)
    share = -(-sum(shard.nbytes for shard in shards) // servers)
    return -(-share // largest) * largest


def _first_with_room(shard: Shard, loads: Mapping[str, int], room: int, beside: Collection[str] = ()) -> str:
    """The first server in the shard's order that has room, and is not in `beside` if there is a choice."""
    most = room - shard.nbytes
    free = [server for server, load in loads.items() if load <= most]
    if not free:  # shards differ in size and none fits: the emptiest
        least = min(loads.values())
        free = [server for server, load in loads.items() if load == least]
        return _preferred(shard.index, free)
    return _preferred(shard.index, [server for server in free if server not in beside] or free)


def _preferred(shard: int, servers: Sequence[str]) -> str:
    """The first in the shard's order of preference: no more servers are hashed than are in question."""
    return max(servers, key=lambda server: (_score(shard, server), server))


def _elsewhere(
    servers: Sequence[str], home: str, hosts: Mapping[str, str] | None, racks: Mapping[str, str] | None
) -> list[str]:
    """The servers that fail least together with `home`: in another rack, else on another host, else all others."""
    others = [server for server in servers if server != home]
    if hosts is not None:
        others = [server for server in others if hosts.get(server) != hosts.get(home)] or others
    if racks and (here := racks.get(home)):
        others = [server for server in others if racks.get(server, "") not in ("", here)] or others
    return others


def _first_with_share(
    shard: Shard, among: Sequence[str], loads: Mapping[str, int], weights: Mapping[str, float], total: int
) -> str:
    """The first server `among` these, in the shard's order, that has less than its share of the `total` bytes."""
    ranked = weighted_ranking(shard.index, {server: weights[server] for server in among})
    everything = fsum(weights.values())
    free = [server for server in ranked if loads[server] + shard.nbytes <= total * weights[server] / everything]
    return free[0] if free else min(ranked, key=lambda server: (loads[server] + shard.nbytes) / weights[server])


def _score(shard: int, server: str) -> bytes:
    return hashlib.blake2b(f"{server}/{shard}".encode(), digest_size=8).digest()


# Places shards on servers whose links are not alike: each gets bytes in proportion to its weight.
#
# Each shard ranks the servers by weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash
# tables", 2005: the score of a server of weight w is -w / ln(u), with u in (0, 1) a hash of server and shard) and takes
# the first that has room. A server's room is its share of all bytes, and also of the bytes up to this shard: shards are
# sent in the order of the layout, so a server must not have its share at one end of it alone.


def place_weighted(
    shards: Sequence[Shard], weights: Mapping[str, float], previous: Mapping[int, str] | None = None
) -> dict[int, str]:
    """The primary of every shard: shard index -> server id. `weights`: above 0, of at least one server.

    Every server gets its share of the bytes, or up to the largest shard more. With `previous`, a shard stays where it
    was if that server has no more than that.
    """
    rooms = _Rooms(shards, weights)
    placed = rooms.kept(shards, previous or {})
    whole, loads = loads_of(shards, placed), dict.fromkeys(weights, 0)
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
    drawn = {server: _within(int.from_bytes(_score(shard, server))) for server in weights}
    return sorted(weights, key=lambda server: (weights[server] / -math.log(drawn[server]), server))[::-1]


class _Rooms:
    """Each server's share of the bytes, and the largest shard."""

    def __init__(self, shards: Sequence[Shard], weights: Mapping[str, float]) -> None:
        self._weights = weights
        everything = fsum(weights.values())
        self._share = {server: weight / everything for server, weight in weights.items()}
        self._total = sum(shard.nbytes for shard in shards)
        self._largest = max((shard.nbytes for shard in shards), default=0)

    def kept(self, shards: Sequence[Shard], previous: Mapping[int, str]) -> dict[int, str]:
        """The shards that stay: shard index -> server id. Who has too much keeps some of everywhere in the layout."""
        whole = loads_of(shards, previous)
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


def loads_of(shards: Sequence[Shard], placed: Mapping[int, str]) -> Counter[str]:
    loads: Counter[str] = Counter()
    for shard in shards:
        if shard.index in placed:
            loads[placed[shard.index]] += shard.nbytes
    return loads


def _within(bits: int) -> float:
    """64 bits as a number in (0, 1): never 0 or 1, as rounding all of them would give."""
    return ((bits >> 12) + 0.5) / 2.0**52
