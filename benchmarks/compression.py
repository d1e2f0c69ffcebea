"""What codecs cost on one core: bytes on the wire, and how fast gradients are encoded, decoded and added.

    python benchmarks/compression.py [--json codecs.json]

16 MiB of gradient-like values in shards of 1 MiB, one thread. Speeds are GB of fp32 in a second of the core's time, the
median of the rounds: other processes that want the same core do not count, those that want the same memory do. The
limit is what the memory gives in the same run: raw's encode is a copy, its decode_add an addition, and the percentages
are of those. The last two columns are of one shard again and again, which stays in the core's cache. Codecs with error
feedback or momentum keep that state for each shard, as a worker does; `feedback` means that its cost is in the figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rallypoint.codec.base import Scratch
from rallypoint.codec.build import build, build_stateless
from rallypoint.codec.spec import DGC, Bf16, CodecSpec, Fp16, Int4, Int8, PowerSGD, RandomK, Raw, Sign, TopK
from rallypoint.net.pool import bytes_of

SHAPE = (512, 512)  # a shard of 1 MiB, and a matrix
SHARDS = 16
_REUSES = 8
GIGA = 1e9

CASES: tuple[tuple[str, CodecSpec], ...] = (
    ("raw", Raw()),
    ("fp16", Fp16()),
    ("bf16", Bf16()),
    ("int8", Int8(error_feedback=False)),
    ("int8, feedback", Int8()),
    ("int8, stochastic", Int8(stochastic=True, error_feedback=False)),
    ("int4", Int4(error_feedback=False)),
    ("sign", Sign(error_feedback=False)),
    ("top-k 1 %, sampled", TopK(error_feedback=False)),
    ("top-k 1 %, sampled, feedback", TopK()),
    ("top-k 1 %, exact", TopK(sampled=False, error_feedback=False)),
    ("random-k 1 %", RandomK(error_feedback=False)),
    ("DGC 0.1 %", DGC()),
    ("PowerSGD rank 4, 512 x 512", PowerSGD(error_feedback=False)),
)


def gradient(seed: int) -> torch.Tensor:
    """Heavy-tailed values whose magnitude differs from row to row, as gradients' do."""
    source = torch.Generator().manual_seed(seed)
    rows = torch.exp(torch.randn(SHAPE[0], 1, generator=source))
    tails = torch.exp(0.5 * torch.randn(SHAPE, generator=source))
    return (1e-3 * rows * tails * torch.randn(SHAPE, generator=source)).reshape(-1)


def measure(spec: CodecSpec, gradients: list[torch.Tensor], rounds: int) -> dict[str, float]:
    """Bytes on the wire over bytes of fp32, and GB of fp32 encoded, and decoded and added, a second."""
    scratch = Scratch()
    encoders = [build(spec, SHAPE, scratch) for _ in gradients]
    decoder = build_stateless(spec, SHAPE, scratch)
    words = gradients[0].numel()
    buffers = [bytes_of(torch.zeros(encoder.bytes_for(words) // 4 + 1)) for encoder in encoders]
    sums = [torch.zeros(words) for _ in gradients]
    used = [0] * len(gradients)

    def encode() -> None:
        for i, values in enumerate(gradients):
            used[i] = encoders[i].encode(values, buffers[i], seed=i)

    def decode_add() -> None:
        for i, total in enumerate(sums):
            decoder.decode_add(buffers[i][: used[i]], total)

    def encode_one() -> None:
        for _ in range(_REUSES):
            used[0] = encoders[0].encode(gradients[0], buffers[0], seed=0)

    def decode_one() -> None:
        for _ in range(_REUSES):
            decoder.decode(buffers[0][: used[0]], sums[0])

    nbytes, reused = 4 * words * len(gradients), 4 * words * _REUSES
    return {
        "encode": nbytes / GIGA / _median_seconds(encode, rounds),
        "decode_add": nbytes / GIGA / _median_seconds(decode_add, rounds),
        "bytes": sum(used) / nbytes,
        "encode_reused": reused / GIGA / _median_seconds(encode_one, rounds),
        "decode_reused": reused / GIGA / _median_seconds(decode_one, rounds),
    }


def _median_seconds(work: Callable[[], None], rounds: int) -> float:
    work()
    seconds = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gradients = [gradient(seed) for seed in range(SHARDS)]
    rows: list[dict[str, Any]] = []
    print(
        f"{'codec':30s} {'bytes/fp32':>10s} {'encode GB/s':>12s} {'of a copy':>10s} "
        f"{'decode_add GB/s':>16s} {'of an addition':>15s} {'encode reused':>14s} {'decode reused':>14s}"
    )
    for name, spec in CASES:
        figures = measure(spec, gradients, arguments.rounds)
        rows.append({"codec": name, **figures})
        encode, decode_add = figures["encode"], figures["decode_add"]
        print(
            f"{name:30s} {figures['bytes']:10.4f} {encode:12.2f} {encode / rows[0]['encode']:10.0%} {decode_add:16.2f} "
            f"{decode_add / rows[0]['decode_add']:15.0%} {figures['encode_reused']:14.2f} "
            f"{figures['decode_reused']:14.2f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
