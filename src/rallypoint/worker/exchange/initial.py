"""One worker uploads the weights, or the states, that all begin with."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from rallypoint.core.layout import Layout, Shard
from rallypoint.core.view import View
from rallypoint.net.frames import Header, Kind
from rallypoint.net.pool import bytes_of
from rallypoint.store.record import ShardRecord, encode_record
from rallypoint.worker.exchange.links import Links

Words = Callable[[int, int], torch.Tensor]
States = Callable[[Shard], ShardRecord]

_UNDER_WAY = 16  # copies of shards at a time


def push_initial(
    layout: Layout, links: Links, view: Callable[[], View | None], check: Callable[[], None], version: int,
    words: Words, state: States | None,
) -> None:  # fmt: skip
    """Push every shard as `version`, a few at a time: ``words(start, stop)`` (1-D fp32 CPU), or of parameters
    ``state(shard)`` if workers have one. `view` is the one in force; None, after another beginning, ends this. `check`
    raises whatever ends the job.
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
