"""The layout of a simulated job."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rallypoint.core.layout import Layout, Part, Shard, TensorSpec, carried_by


def layout_of(
    count: int, buffers: Collection[int], tables: Sequence[int], groups: Sequence[int], carried: int = 0
) -> Layout:
    """Return a layout of `count` shards of 16 words, those of parameters in these optimizer groups, one after another.

    `buffers` and `tables` are shards: buffers, and the parts of a table. The last of them are what so many replicas
    carry, a shard each.
    """
    of = [-1 if i in buffers else groups[i % len(groups)] for i in range(count)]
    for replica in range(carried):
        of[count - carried + replica] = carried_by(replica)
    parts = {i: Part(0, part, len(tables), 1) for part, i in enumerate(tables)}
    shards = tuple(
        Shard(i, group, 16 * i, 16 * i + 16) if i not in parts else Shard(i, group, 0, 0, 16, parts[i])
        for i, group in enumerate(of)
    )
    specs = (TensorSpec("table", (len(tables), 16), "float32", 0),) if tables else ()
    return Layout((), shards, 16 * count, "simulated", specs)
