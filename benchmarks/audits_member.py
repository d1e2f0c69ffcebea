"""What a worker of benchmarks/audits.py trains: an MLP, perhaps with an error in its computation."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import rallypoint as rp

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.wrong import WrongComputation


def train(job: rp.Job, wrong: dict[str, str], first: int, hidden: int, settings: dict[str, Any]) -> float:
    """Train; the workers in `wrong` (worker -> kind of error) compute wrong from step `first` on. Returns the mean
    seconds of a step, without the first ten."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    last = torch.nn.Linear(hidden, 8)
    model = torch.nn.Sequential(torch.nn.Linear(32, hidden), torch.nn.Tanh(), last)
    generator = torch.Generator().manual_seed(9)
    data = torch.utils.data.TensorDataset(
        torch.randn(512, 32, generator=generator), torch.randn(512, 8, generator=generator)
    )
    run = job.train(model, data, **settings)
    error = WrongComputation(wrong[job.id], last.weight) if job.id in wrong else None
    began, steps = 0.0, 0
    for micro in run:
        if micro.step == 10 and not began:
            began = time.monotonic()
        steps = micro.step
        with micro, nullcontext() if error is None else error.computing(micro.step >= first):
            x, y = micro.batch if error is None else map(error.batch, micro.batch)
            micro.backward(torch.nn.functional.mse_loss(model(x).float(), y))
    return (time.monotonic() - began) / max(1, steps - 9)
