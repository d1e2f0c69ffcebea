"""A job that reads an iterator to its end: items without positions, in four parts that are read side by side.

    rallypoint run --workers 2 --servers 1 examples/stream.py

Kill a worker: another one opens its parts, skips what was read before, and the weights end the same.
"""

import hashlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F

import rallypoint as rp

PARTS = 4


def numbers(part: int, epoch: int) -> Iterator[int]:
    """What a log, a query or a crawl would give; the same again whenever it is opened."""
    yield from range((part + epoch) % PARTS, 4096, PARTS)


def sample(number: int) -> tuple[torch.Tensor, int]:
    """Called for items that are used, and for none that are skipped."""
    digits = torch.tensor([number >> bit & 1 for bit in range(12)], dtype=torch.float32)
    return digits + 0.1 * torch.randn(12), number % 3


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
with rp.join() as job:
    stream = rp.Stream(numbers, parts=PARTS, passes=2, transform=sample)
    run = job.train(model, stream, replicas=4, batch=16, steps=1000, optimizer=rp.AdamW(lr=1e-2))
    for micro in run:
        with micro:
            x, y = micro.batch
            micro.backward(F.cross_entropy(model(x), y))
    if run.lead:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        print(f"{run.step} steps: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
