"""The shards of a workload in bundles: those that lie beside each other, one on each server of a group.

All servers of a group are alike, and neighbouring shards are placed on different ones (`core.placement`), so the shards
of a bundle travel at the same time, each on its own link. The cost model moves bundles, not shards: a model of 7e9
parameters has 26,703 shards, and on 64 servers 418 bundles.

Where there are few, a bundle would wait for the last of its shards: `split` then makes smaller groups of servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rallypoint.core.cost.site import Servers, Site
from rallypoint.core.cost.workload import Workload
from rallypoint.core.layout import WORD_BYTES

MOST_BUNDLES = 256  # a step of more is computed with larger shards
_FEWEST_BUNDLES, _MOST_GROUPS = 32, 16


class Bundle(msgspec.Struct, frozen=True):
    """Shards [first, first + count) of equal size, on so many servers of a group.

    Attributes:
        group: the group of servers.
        count: the shards, each on a server of its own.
        words: of each shard.
        ready: the layer whose backward pass completes them: the lowest that has words in them.
        layers: all layers that have words in them.
    """

    group: int
    count: int
    words: int
    ready: int
    layers: tuple[int, ...]


def split(workload: Workload, site: Site) -> Site:
    """The site; if there are few bundles, with its servers in more groups."""
    count = site.server_count
    runs = workload.nbytes / workload.shard_bytes / count
    groups = min(_MOST_GROUPS, count, math.ceil(_FEWEST_BUNDLES / runs))
    if site.beside or groups <= len(site.servers):
        return site
    servers = [
        Servers(size, group.rate)
        for group in site.servers
        for size in _evenly(group.count, max(1, round(groups * group.count / count)))
    ]
    return msgspec.structs.replace(site, servers=tuple(servers))


def _evenly(count: int, parts: int) -> list[int]:
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]


def bundles_of(workload: Workload, servers: Sequence[Servers]) -> list[Bundle]:
    """All bundles, in backward order: the last layer's shards are first (`core.layout`)."""
    size = _shard_words(workload, servers)
    ends, reached = [0] * len(workload.layers), 0
    for index in reversed(range(len(workload.layers))):
        reached += workload.layers[index].words
        ends[index] = reached  # of the layer's words in backward order
    found: list[Bundle] = []
    start, group = 0, 0
    while start < reached:
        count = min(servers[group].count, -(-(reached - start) // size))
        stop = min(start + count * size, reached)
        layers = tuple(
            index for index, layer in enumerate(workload.layers)
            if layer.words and start < ends[index] and ends[index] - layer.words < stop
        )  # fmt: skip
        found.append(Bundle(group, count, -(-(stop - start) // count), min(layers), layers))
        start, group = stop, (group + 1) % len(servers)
    return found


def _shard_words(workload: Workload, servers: Sequence[Servers]) -> int:
    """The words of a shard; more than the workload says where there would be too many bundles."""
    size = workload.shard_bytes // WORD_BYTES
    runs = workload.words / (size * sum(group.count for group in servers))
    return max(size, round(size * runs * len(servers) / MOST_BUNDLES))
