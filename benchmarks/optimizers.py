"""What torch's optimizers cost on one server thread, per MiB of fp32 parameters.

    python benchmarks/optimizers.py
"""

from __future__ import annotations

import time
from typing import Any

import torch

WORDS = 1 << 18  # one shard of 1 MiB
SHARDS = 16
ROUNDS = 6

CASES: tuple[tuple[str, type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    ("AdamW, for-loop", torch.optim.AdamW, {"foreach": False, "fused": False}),
    ("AdamW, foreach (what servers run)", torch.optim.AdamW, {"foreach": True}),
    ("AdamW, fused", torch.optim.AdamW, {"fused": True}),
    ("SGD with momentum, foreach", torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
)


def microseconds(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> float:
    """The best round's time of one step on one shard."""
    shards = [torch.nn.Parameter(torch.randn(WORDS)) for _ in range(SHARDS)]
    optimizers = [kind([shard], lr=1e-3, weight_decay=0.1, **settings) for shard in shards]  # type: ignore[call-arg]
    for shard in shards:
        shard.grad = torch.randn(WORDS)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        best = min(best, time.perf_counter() - start)
    return best / SHARDS * 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, kind, settings in CASES:
        print(f"{name:36s} {microseconds(kind, settings):7.0f} us/MiB")
