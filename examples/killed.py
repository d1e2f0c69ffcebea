"""A loop with a mistake that only a kill shows: it counts in its process what it could have read from the micro-batch.

    python examples/killed.py                      # says at which step, and in which tensors, the weights first differ
"""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import rallypoint as rp
from rallypoint.testing import simulate


def train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    dataset = TensorDataset(torch.randn(256, 8), torch.randint(2, (256,)))
    seen = 0
    with rp.join() as job:
        for micro in job.train(model, dataset, replicas=2, batch=8, steps=20, optimizer=rp.SGD(lr=0.1)):
            with micro:
                x, y = micro.batch
                seen += 1  # the mistake: who takes over has seen nothing, and begins to warm up again
                micro.backward(F.cross_entropy(model(x), y) * min(1.0, seen / 20))  # right: (micro.step + 1) / 10


if __name__ == "__main__":
    print(simulate(train, kills=2, seed=1))
