"""The script of `watching.py`: a small model, no padding, so that whatever else runs takes its processor time."""

from __future__ import annotations

import sys

import torch

import rallypoint as rp

WIDTH = 512


def main(steps: int, batch: int, fingerprints: int) -> None:
    """Train for so many steps."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()] * 2
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    data = torch.utils.data.TensorDataset(torch.randn(1024, WIDTH), torch.randn(1024, 1))
    with rp.join() as job:
        for micro in job.train(
            model, data, replicas=2, batch=batch, steps=steps, optimizer=rp.AdamW(lr=1e-3),
            audit=rp.Audit(fingerprints=fingerprints)
        ):
            with micro:
                inputs, targets = micro.batch
                loss = (model(inputs) - targets).square().mean()
                micro.log(error=loss)
                micro.backward(loss)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
