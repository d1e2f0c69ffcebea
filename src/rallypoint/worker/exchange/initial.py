"""The upload of the weights, or states, that all workers start from."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import xxhash

from rallypoint.core.layout import Layout, Shard
from rallypoint.core.view import View
from rallypoint.net.frames import Header, Kind
from rallypoint.net.pool import bytes_of
from rallypoint.store.record import ShardRecord, encode_record
from rallypoint.worker.exchange.links import Links

Words = Callable[[int, int], torch.Tensor]
States = Callable[[Shard], ShardRecord]

_UNDER_WAY = 16  # shards that are copied and not sent yet
_AT_ONCE = 1 << 20  # words that are digested at once


def digest_of(layout: Layout, words: Words) -> bytes:
    """Return the digest (XXH3-128) of the first weights, wherever shards are cut; of tables, which servers make, not.

    `words` as in `push_initial`.
    """
    digest = xxhash.xxh3_128()
    for entry in layout.entries:
        for start in range(entry.start, entry.stop, _AT_ONCE):
            digest.update(bytes_of(words(start, min(start + _AT_ONCE, entry.stop))))
    return digest.digest()


def push_initial(
    layout: Layout, links: Links, view: Callable[[], View | None], check: Callable[[], None], version: int,
    words: Words, state: States | None,
) -> None:  # fmt: skip
    """Upload every shard as `version`, a few at a time. Called by the one worker that uploads.

    A shard's values are ``words(start, stop)`` (1-D fp32 CPU), or ``state(shard)`` for parameters where workers have
    states. `view` returns the view in force, or None in a new generation: then the upload ends. `check` raises the
    error that ends the job.
    """
    room = threading.Semaphore(_UNDER_WAY)
    for shard in layout.shards:
        while not room.acquire(timeout=0.1):
            check()
            if view() is None:
                return
        if (now := view()) is None:
            return
        header = Header(Kind.INITIAL, now.number, shard=shard.index, step=version, length=shard.slot_bytes)
        if (link := links.get(now.primary[shard.index])) is None:
            room.release()
        elif state is not None and shard.role == "parameters":
            data = memoryview(encode_record(state(shard), "none"))
            link.push(header._replace(kind=Kind.STATE, length=len(data)), data, sent=room.release)
        else:
            link.push(header, bytes_of(words(shard.start, shard.stop)), sent=room.release)
