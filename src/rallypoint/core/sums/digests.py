"""Digests of contributions: what one replica adds to one shard at one step, in 16 bytes.

A contribution is a pure function of its name (I11). So whoever computes it again, on any worker, gets the same digest:
audits compare them between workers, `rallypoint replay` with those that the run has recorded.

What is digested is the replica's leaf in the tree of the sum (I3): weight x gradient, each product rounded to fp32,
before anything is added to it and before a codec writes it. With fp16 the gradient is that of the scaled loss.
"""

from __future__ import annotations

import xxhash

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
