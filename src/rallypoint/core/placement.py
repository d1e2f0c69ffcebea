"""Places shards on servers: rendezvous hashing with bounded load; few shards move when servers come and go.

Each shard ranks the servers by a hash of (server, shard) (Thaler and Ravishankar, 1998) and is placed on the first
that still has room (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018). A server's room
is the even share in bytes, rounded up to a multiple of the largest shard: the fullest server sets the time of a step.

Shards are placed in runs, one on each server: a layer's shards are neighbours, they are sent at the same time, and the
next forward pass waits for all of them. Were they on few servers, these servers' links would carry them alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from rallypoint.core.layout import Shard

_TOLERATED = 1.25  # a server keeps its shards up to so many times its room when servers come or go: moves are slow


def place(
    shards: Sequence[Shard], servers: Sequence[str], previous: Mapping[int, str] | None = None
) -> dict[int, str]:
    """The primary of every shard: shard index -> server id.

    With `previous`, a shard stays where it was if that server is among `servers` and at most a quarter over its room.
    Raises ValueError when there is no server.
    """
    if not servers:
        raise ValueError("there is no server to place shards on")
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
        for shard in run:
            if shard.index not in placed:
                home = _first_with_room(shard, loads, room, {placed.get(other.index) for other in run})
                placed[shard.index] = home
                loads[home] += shard.nbytes
    return {shard.index: placed[shard.index] for shard in shards}


def place_backups(
    shards: Sequence[Shard], servers: Sequence[str], primary: Mapping[int, str],
    previous: Mapping[int, str] | None = None, hosts: Mapping[str, str] | None = None,
) -> dict[int, str]:  # fmt: skip
    """The backup of every shard (shard index -> server id), on another server than its primary; {} if there is none.

    It is on another host too if there is one (`hosts`: server id -> host). With `previous`, a backup stays where it was
    if that server is among `servers` and is not the primary.
    """
    if len(servers) < 2:
        return {}
    loads = dict.fromkeys(servers, 0)
    room = _room(shards, len(servers))
    placed: dict[int, str] = {}
    for shard in shards:
        home = (previous or {}).get(shard.index)
        if home in loads and home != primary[shard.index]:
            placed[shard.index] = home
            loads[home] += shard.nbytes
    for shard in shards:
        if shard.index not in placed:
            others = [server for server in servers if server != primary[shard.index]]
            if hosts is not None:
                here = hosts.get(primary[shard.index])
                others = [server for server in others if hosts.get(server) != here] or others
            home = _first_with_room(shard, {server: loads[server] for server in others}, room)
            placed[shard.index] = home
            loads[home] += shard.nbytes
    return {shard.index: placed[shard.index] for shard in shards}


def ranking(shard: int | str, servers: Sequence[str]) -> list[str]:
    """All servers in the shard's order of preference. (Hosts, in that of a piece of a data set: `data/cache/`.)"""
    return sorted(servers, key=lambda server: (_score(shard, server), server), reverse=True)


def _room(shards: Sequence[Shard], servers: int) -> int:
    largest = max((shard.nbytes for shard in shards), default=1)
    share = -(-sum(shard.nbytes for shard in shards) // servers)
    return -(-share // largest) * largest


def _first_with_room(
    shard: Shard, loads: Mapping[str, int], room: int, beside: Collection[str | None] = ()
) -> str:  # fmt: skip
    """The first server in the shard's order that has room, and is not in `beside` if there is a choice."""
    ranked = ranking(shard.index, list(loads))
    free = [server for server in ranked if loads[server] + shard.nbytes <= room]
    if free:
        return next((server for server in free if server not in beside), free[0])
    return min(ranked, key=lambda server: loads[server])  # shards differ in size and none fits: the emptiest


def _score(shard: int | str, server: str) -> bytes:
    return hashlib.blake2b(f"{server}/{shard}".encode(), digest_size=8).digest()
