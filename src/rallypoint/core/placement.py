"""Shards to servers: rendezvous hashing with bounded load, and minimal moves when servers come and go.

Each shard ranks the servers by a hash of (server, shard) (Thaler and Ravishankar, 1998) and takes the first that still
has room (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018). The room is the even
share in bytes, rounded up to one largest shard, because the fullest server sets the time of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from rallypoint.core.layout import Shard

_TOLERATED = 1.25  # a server may keep so much of the even share when others come or go: each move costs a step


def place(
    shards: Sequence[Shard], servers: Sequence[str], previous: Mapping[int, str] | None = None
) -> dict[int, str]:
    """The primary of every shard: shard index to server id.

    With `previous`, a shard stays where it was as long as that server is still here and not a quarter over its share.
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
    for shard in shards:
        if shard.index not in placed:
            home = _first_with_room(shard, loads, room)
            placed[shard.index] = home
            loads[home] += shard.nbytes
    return {shard.index: placed[shard.index] for shard in shards}


def place_backups(
    shards: Sequence[Shard], servers: Sequence[str], primary: Mapping[int, str],
    previous: Mapping[int, str] | None = None, hosts: Mapping[str, str] | None = None,
) -> dict[int, str]:  # fmt: skip
    """A backup for every shard on another server than its primary, on another host if there is one; {} if no other.

    A backup stays where it was as long as that server is here and is not the primary.
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


def ranking(shard: int, servers: Sequence[str]) -> list[str]:
    """All servers, the shard's favourite first."""
    return sorted(servers, key=lambda server: (_score(shard, server), server), reverse=True)


def _room(shards: Sequence[Shard], servers: int) -> int:
    largest = max((shard.nbytes for shard in shards), default=1)
    share = -(-sum(shard.nbytes for shard in shards) // servers)
    return -(-share // largest) * largest


def _first_with_room(shard: Shard, loads: Mapping[str, int], room: int) -> str:
    ranked = ranking(shard.index, list(loads))
    for server in ranked:
        if loads[server] + shard.nbytes <= room:
            return server
    return min(ranked, key=lambda server: loads[server])  # odd sizes left no full gap: the emptiest takes it


def _score(shard: int, server: str) -> bytes:
    return hashlib.blake2b(f"{server}/{shard}".encode(), digest_size=8).digest()
