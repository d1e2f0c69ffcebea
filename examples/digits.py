"""A script of your own: a small classifier on scikit-learn's digits, on as many workers and servers as you like.

    rallypoint run --workers 4 --servers 2 examples/digits.py
    python examples/digits.py                                   # alone: a whole cluster inside this process
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import rallypoint as rp

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
dataset = TensorDataset(images[:1500], labels[:1500])

torch.manual_seed(0)  # the same first weights each time
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10))

with rp.join() as job:
    run = job.train(model, dataset, replicas=4, batch=32, steps=200, seed=1, optimizer=rp.AdamW(lr=rp.cosine(3e-3)))

    @run.every(50)
    def accuracy(step: int) -> dict[str, float]:
        return {"accuracy": float((model(images[1500:]).argmax(1) == labels[1500:]).float().mean())}

    for micro in run:  # this worker's share of every step
        with micro:  # seeds dropout for (step, replica): the result does not depend on who computes it
            x, y = micro.batch
            micro.backward(F.cross_entropy(model(x), y))
