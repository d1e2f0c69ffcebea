"""Evolution strategies on a key-value store: no data set, no loss, no backward pass.

    rallypoint run --workers 4 --servers 2 examples/evolution.py

Fits a small network to sin(3x) by trying mutations (OpenAI's evolution strategies; Salimans et al., 2017, algorithm 2).
Contributor c tries mutations at step t that follow from (t, c) alone: a killed worker's are tried again by another.
"""

from __future__ import annotations

import hashlib

import torch

import rallypoint as rp

STEPS, CONTRIBUTORS, PAIRS, SIGMA = 200, 8, 16, 0.05
HIDDEN = 16
X = torch.linspace(-1, 1, 64).unsqueeze(1)
Y = torch.sin(3 * X)


def error(weights: torch.Tensor) -> torch.Tensor:
    """The mean squared error of a network whose weights are this vector."""
    first, bias, last = weights.view(3, HIDDEN)
    found: torch.Tensor = torch.tanh(X * first + bias) @ last.unsqueeze(1)
    return torch.nn.functional.mse_loss(found, Y)


def estimated_gradient(weights: torch.Tensor, step: int, contributor: int) -> torch.Tensor:
    """The gradient of the expected error, from pairs of mutations in opposite directions."""
    generator = torch.Generator().manual_seed(step * CONTRIBUTORS + contributor)
    noise = torch.randn(PAIRS, len(weights), generator=generator)
    better = torch.stack([error(weights + SIGMA * one) - error(weights - SIGMA * one) for one in noise])
    return (better.unsqueeze(1) * noise).mean(0) / (2 * SIGMA)


def main() -> None:
    first = torch.randn(3 * HIDDEN, generator=torch.Generator().manual_seed(0))
    with rp.join() as job, torch.no_grad():
        store = job.store({"weights": first}, contributors=CONTRIBUTORS, steps=STEPS, optimizer=rp.Adam(lr=0.05))
        for step, contributor in store.due("weights", STEPS):
            weights = store.pull("weights", step=step)
            store.push("weights", estimated_gradient(weights, step, contributor), step=step, contributor=contributor)
        weights = store.pull("weights", step=STEPS)
        if 0 in store.contributors:
            digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
            print(f"error {error(first):.4f} before, {error(weights):.4f} after; weights {digest}", flush=True)


if __name__ == "__main__":
    main()
