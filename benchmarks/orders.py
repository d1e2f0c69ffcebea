"""How well each order mixes a data set, how often it reads a shard, and what a resume costs to find its place.

    python benchmarks/orders.py [--rounds 5] [--json FILE]

1. One pass over about 10^6 samples in 1,000 shards of 1 to 1,999, by 8 replicas with a batch of 64. For each order:
   - how far apart two neighbours of one shard are read, in positions, as a share of a full shuffle's (1/3 of the pass);
   - from how many shards the samples of one step come;
   - how far the mean of a step's samples is from that of all, where each sample's value is its place in the data set
     (the worst case: sorted data), in multiples of a full shuffle's;
   - how often a shard is read, by 1 and by 4 workers that each keep their share of 2 * max(mixed_shards,
     replicas) shards.
2. The processor time to the first micro-batch's positions at step 1,950,000 of 10^9 samples, in more and more shards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from rallypoint.core.order import SampleOrder
from rallypoint.data.order import OrderAhead

REPLICAS, BATCH, SHARDS, SAMPLES = 8, 64, 1000, 1_000_000
FAR = 1_950_000


def lengths_of(shards: int, samples: int, *, uneven: bool) -> list[int]:
    if not uneven:
        return [samples // shards] * shards
    drawn = np.random.default_rng(0).integers(1, 2 * samples // shards, shards)
    return [int(length) for length in drawn]


def order_of(name: str, mixed: int, lengths: list[int]) -> OrderAhead:
    order = SampleOrder(
        seed=0, samples=sum(lengths), replicas=REPLICAS, batch=BATCH, shuffled=name == "shuffled",
        shards=lengths if name == "windowed" else (), mixed=mixed,
    )  # fmt: skip
    return OrderAhead(order, BATCH)


def mixing(name: str, mixed: int, lengths: list[int]) -> dict[str, Any]:
    ahead, steps = order_of(name, mixed, lengths), sum(lengths) // (REPLICAS * BATCH)
    read = np.array([[ahead.samples(step, replica) for replica in range(REPLICAS)] for step in range(steps)])
    samples = read.reshape(-1)
    at = np.full(sum(lengths), -1)
    at[samples] = np.arange(len(samples))
    shard = np.repeat(np.arange(len(lengths)), lengths)
    pairs = (shard[1:] == shard[:-1]) & (at[1:] >= 0) & (at[:-1] >= 0)
    means = (read.reshape(steps, -1) / len(shard)).mean(axis=1)
    expected = np.sqrt(1 / 12 / (REPLICAS * BATCH))
    return {
        "order": f"{name} {mixed}" if name == "windowed" else name,
        "distance": float(np.abs(np.diff(at))[pairs].mean() / (len(shard) / 3)),
        "shards_of_step": float(np.mean([len(np.unique(shard[of])) for of in read.reshape(steps, -1)])),
        "deviation": float(np.sqrt(np.mean((means - 0.5) ** 2)) / expected),
        "reads": {workers: reads(read, shard, workers, 2 * max(mixed, REPLICAS)) for workers in (1, 4)},
    }


def reads(read: Any, shard: Any, workers: int, kept: int) -> float:
    """How often a shard is read in the pass: the mean."""
    count, share = 0, REPLICAS // workers
    for worker in range(workers):
        recent: OrderedDict[int, None] = OrderedDict()
        for of_step in shard[read[:, worker * share : (worker + 1) * share]]:
            for micro in of_step:
                for needed in np.unique(micro).tolist():
                    count += needed not in recent
                    recent[needed] = None
                    recent.move_to_end(needed)
                    if len(recent) > kept // workers:
                        recent.popitem(last=False)
    return count / len(np.unique(shard))


def resume(shards: int, rounds: int) -> dict[str, Any]:
    lengths, taken = lengths_of(shards, 10**9, uneven=False), []
    for _ in range(rounds):
        begin = time.process_time()
        order_of("windowed", 16, lengths).samples(FAR, 3)
        taken.append(time.process_time() - begin)
    return {"shards": shards, "ms": 1000 * statistics.median(taken)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    lengths = lengths_of(SHARDS, SAMPLES, uneven=True)
    found = [
        mixing(name, mixed, lengths)
        for name, mixed in [("shuffled", 16), ("sequential", 16), *(("windowed", mixed) for mixed in (8, 16, 64, 256))]
    ]
    print(
        f"{'order':>14} {'distance':>9} {'shards/step':>12} {'deviation':>10} {'reads, 1 worker':>16} {'4 workers':>10}"
    )
    for row in found:
        one, four = row["reads"].values()
        print(
            f"{row['order']:>14} {row['distance']:9.3f} {row['shards_of_step']:12.1f} {row['deviation']:10.2f} "
            f"{one:16.2f} {four:10.2f}"
        )
    resumes = [resume(shards, given.rounds) for shards in (1_000, 100_000, 1_000_000)]
    for row in resumes:
        print(f"resume at step {FAR:,}, {row['shards']:>9,} shards: {row['ms']:.1f} ms")
    if given.json:
        machine = {"cores": os.cpu_count()}
        given.json.write_text(json.dumps({"machine": machine, "results": [*found, *resumes]}, indent=1))


if __name__ == "__main__":
    main()
