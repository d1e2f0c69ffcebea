"""Digests of contributions: what one replica adds to one shard at one step, in 16 bytes.

A contribution is a pure function of its name (I11). So whoever computes it again, on any worker, gets the same digest:
audits compare them between workers, `rallypoint replay` with those that the run has recorded.

What is digested is the replica's leaf in the tree of the sum (I3): weight x gradient, each product rounded to fp32,
before anything is added to it and before a codec writes it. With fp16 the gradient is that of the scaled loss.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash

from rallypoint.core.layout import Layout

DIGEST_BYTES = 16


def leaf_digest(leaf: bytes | bytearray | memoryview) -> bytes:
    """Return the digest (XXH3-128, 16 bytes) of a leaf: the fp32 words of one shard, little-endian, one after another.

    It finds accidents, not forgers: anybody can make another leaf of the same digest.

    Raises ValueError if these are not whole words.
    """
    nbytes = leaf.nbytes if isinstance(leaf, memoryview) else len(leaf)
    if nbytes % 4:
        raise ValueError(f"a leaf of {nbytes} bytes: it has fp32 words of 4 bytes each")
    return xxhash.xxh3_128_digest(leaf)


def dense_shards(layout: Layout) -> list[int]:
    """The shards whose contributions are digested, in order: those of parameters, without buffers and tables."""
    return [shard.index for shard in layout.shards if shard.role == "parameters"]


class Piece(NamedTuple):
    """A tensor's words in one shard: [start, stop), counted from the shard's first word."""

    name: str
    start: int
    stop: int


def pieces_of(layout: Layout) -> list[list[Piece]]:
    """By shard: the pieces of tensors that it holds, in order. A part of a table is one piece."""
    found: list[list[Piece]] = [[] for _ in layout.shards]
    for entry in layout.entries:
        for index in layout.shards_touching(entry.start, entry.stop) if entry.start < entry.stop else ():
            shard = layout.shards[index]
            start, stop = max(entry.start, shard.start), min(entry.stop, shard.stop)
            found[index].append(Piece(entry.spec.name, start - shard.start, stop - shard.start))
    for shard in layout.shards:
        if shard.part is not None:
            found[shard.index].append(Piece(layout.tables[shard.part.table].name, 0, shard.words))
    return found
