"""A worker of benchmarks/recovery.py and uneven.py: steps of a given length that leave the processor alone."""

from __future__ import annotations

import os
import sys
import time

import torch

import rallypoint as rp
from rallypoint.launch import environment


def main() -> None:
    """Train a small network; argv: steps, replicas, seconds of a replica's step, perhaps a slow worker and how slow."""
    steps, replicas, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if len(sys.argv) > 4 and os.environ.get(environment.ID) == sys.argv[4]:
        seconds *= float(sys.argv[5])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randn(512, 64))
    with rp.join() as job:
        run = job.train(
            model, data, steps=steps, replicas=replicas, batch=8, optimizer=rp.AdamW(lr=1e-3), clip=1.0,
            network=rp.Network(shard_bytes=64 << 10),
        )  # fmt: skip
        for micro in run:
            with micro:
                x, y = micro.batch
                time.sleep(seconds)
                micro.backward(torch.nn.functional.mse_loss(model(x), y))


if __name__ == "__main__":
    main()
