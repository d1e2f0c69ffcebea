"""How large shards are to be, where the job does not say: chosen once, by the cost model, before any step."""

from __future__ import annotations

from typing import NamedTuple

from rallypoint.core.cost.pipeline import step_cost
from rallypoint.core.cost.site import Servers, Site, Workers
from rallypoint.core.cost.workload import Workload, layers_of
from rallypoint.core.layout import SHARD_BYTES, WORD_BYTES

_SIZES = tuple(SHARD_BYTES >> power for power in range(6))  # 1 MiB to 32 KiB
_NEAR = 1.05  # of the shortest step: larger shards cost processors less
# Seconds that a message costs its two ends beside its bytes. `reduce.py --alone --loopback --workers 2 --servers 1
# --megabytes 16` took 0.65 s more with 488 shards than with 16: 0.7 ms each, of three processes on two busy cores.
_MESSAGE_S = 0.3e-3
_ASSUMED_MBIT = 1000.0
_LAYERS = 8  # of equal size: the last shards of one travel while the next one's do


class Chosen(NamedTuple):
    """A size of shards in bytes, and a sentence for the log that says why."""

    shard_bytes: int
    why: str


def shards_for(nbytes: int, workers: int, servers: int, mbit: float = 0.0) -> Chosen:
    """Choose the size of shards for a job of `nbytes` of parameters: the largest one, of 32 KiB to 1 MiB, with which
    the cost model's step without computing is at most 5 % longer than with the best.

    `mbit` is what a link carries, as it was told; 0: 1 Gbit/s is assumed. The first shard travels up alone, and the
    last one down: what that costs depends on how many there are for each server, hardly on the rate.
    """
    rate = (mbit or _ASSUMED_MBIT) * 1e6 / 8
    site = Site(workers=(Workers(max(1, workers), rate),), servers=(Servers(max(1, servers), rate),), losses=None)
    layers = layers_of([max(1, nbytes // WORD_BYTES // _LAYERS)] * _LAYERS, 0.0)
    messages = max(1.0, workers / max(1, servers)) * nbytes * _MESSAGE_S  # of the busiest process
    seconds = {
        size: step_cost(Workload(layers=layers, shard_bytes=size), site).seconds + messages / size for size in _SIZES
    }
    best = min(seconds.values())
    size = max(size for size, found in seconds.items() if found <= _NEAR * best)
    times = seconds[SHARD_BYTES] / seconds[size]
    link = f"links of {mbit:g} Mbit/s" if mbit else "links of 1 Gbit/s, which are assumed"
    return Chosen(size, (
        f"shard_bytes {size >> 10} KiB, by the cost model: for {nbytes / 1e6:.3g} MB on {max(1, servers)} servers with "
        f"{link}, synchronising is {times:.2f} x as fast as with {SHARD_BYTES >> 10} KiB"
    ))  # fmt: skip
