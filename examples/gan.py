"""A GAN on a key-value store: two models, two optimizers, no data set.

    rallypoint run --workers 3 --servers 2 --replication 2 examples/gan.py --steps 500

The generator learns to draw from a normal distribution (mean 3, deviation 0.5). What contributor c does at step t
follows from the two values at step t and from (t, c) alone, so the models end with the same bytes whatever is killed.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import rallypoint as rp

KEYS = ("discriminator", "generator")
CONTRIBUTORS, BATCH, NOISE = 4, 64, 2
MEAN, DEVIATION = 3.0, 0.5
BETAS = (0.5, 0.999)


def perceptron(inputs: int) -> nn.Module:
    """A small network with one output."""
    return nn.Sequential(nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def gradient(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The loss's gradient, of all parameters of this model and of no other, as one vector."""
    return torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss, list(model.parameters()))])


def real_or_not(logits: torch.Tensor, real: float) -> torch.Tensor:
    """The loss of a discriminator that should say `real` (1.0 or 0.0) of all of these."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps of each of the two optimizers (500)")
    steps: int = parser.parse_args().steps
    torch.manual_seed(0)  # the same first values on each worker
    models = {"discriminator": perceptron(1), "generator": perceptron(NOISE)}
    d, g = models["discriminator"], models["generator"]
    with rp.join() as job:
        store = job.store(
            {name: parameters_to_vector(model.parameters()) for name, model in models.items()},
            contributors=CONTRIBUTORS, steps=steps,
            optimizer={"discriminator": rp.Adam(lr=5e-3, betas=BETAS), "generator": rp.Adam(lr=2e-3, betas=BETAS)},
        )  # fmt: skip

        def load(step: int) -> None:
            for name, model in models.items():
                vector_to_parameters(store.pull(name, step=step), model.parameters())

        for step, contributor in store.due(KEYS, steps):
            load(step)
            random = torch.Generator().manual_seed(step * CONTRIBUTORS + contributor)
            real = MEAN + DEVIATION * torch.randn(BATCH, 1, generator=random)
            fake = g(torch.randn(BATCH, NOISE, generator=random))
            of_d = real_or_not(d(real), 1.0) + real_or_not(d(fake.detach()), 0.0)
            of_g = real_or_not(d(fake), 1.0)
            store.push("discriminator", gradient(of_d, d), step=step, contributor=contributor)
            store.push("generator", gradient(of_g, g), step=step, contributor=contributor)
        load(steps)
        with torch.no_grad():
            drawn = g(torch.randn(4096, NOISE, generator=torch.Generator().manual_seed(1)))
        both = torch.cat([parameters_to_vector(model.parameters()) for model in models.values()])
        digest = hashlib.sha256(both.detach().numpy().tobytes()).hexdigest()[:16]
        print(f"drawn: mean {drawn.mean():.2f}, deviation {drawn.std():.2f}; models {digest}", flush=True)


if __name__ == "__main__":
    main()
