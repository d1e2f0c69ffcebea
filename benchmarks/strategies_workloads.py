"""What `benchmarks/strategies.py` trains: the recipes' models, of a size at which two cores can be four workers.

A step's computation is padded by sleeping to the same length on every worker, as in uneven.py: four workers and two
servers share two cores here, and without it the table would show who had a core, not what synchronising costs. A slow
worker's is padded to three times that.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rallypoint.data.dataset import MapDataset
from rallypoint.recipes.gpt_model import GPT, GPTConfig
from rallypoint.recipes.resnet_model import ResNet, ResNetConfig, load_digits
from rallypoint.recipes.text import load_text

Validation = tuple[Tensor, Tensor]
_TEXT = GPTConfig(layers=2, heads=4, width=136, block=64)
_TEXT_BYTES = 4 << 20
_VALIDATION_WINDOWS = 128
_CHUNK = 32  # samples of one evaluation's forward pass
_CALIBRATIONS = 5


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its data and the samples it is given.

    Attributes:
        build: makes the model from torch's global generator; it has a `loss(x, y)`.
        data: the training data, and the whole of what is evaluated as one pair (x, y).
        batch: samples of an update, over all workers.
        steps: updates, where a mode has updates of `batch` samples; every mode is given steps * batch samples.
        every: steps between two points of the curve; more where a mode's local steps say so.
        sample_seconds: how long one sample takes a worker that is not slow.
        slack: nats over the baseline's last loss at which the goal lies, beside the margin.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], tuple[MapDataset, Validation]]
    batch: int
    steps: int
    every: int
    sample_seconds: float
    slack: float = 0.0


def _text() -> tuple[MapDataset, Validation]:
    train, validation = load_text(block=_TEXT.block, budget=_TEXT_BYTES)
    return train, validation.fixed_windows(_VALIDATION_WINDOWS)


def _digits() -> tuple[MapDataset, Validation]:
    train, validation = load_digits()
    images, labels = validation.tensors
    return train, (images, labels)


WORKLOADS: Mapping[str, Workload] = {
    "gpt": Workload(lambda: GPT(_TEXT), _text, batch=16, steps=160, every=8, sample_seconds=0.015),
    "resnet": Workload(
        lambda: ResNet(ResNetConfig(width=40)), _digits, batch=64, steps=96, every=8, sample_seconds=0.004, slack=0.05
    ),
}


def build(workload: Workload, seed: int) -> nn.Module:
    """The model with the first weights of that seed: the same ones in every process."""
    torch.manual_seed(1000 + seed)
    return workload.build()


def shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """The parameters as codecs may see them: matrices where they have several dimensions."""
    return [tuple(p.flatten(1).shape) if p.dim() > 1 else tuple(p.shape) for p in model.parameters()]


@torch.no_grad()
def evaluate(model: nn.Module, validation: Validation) -> float:
    """The mean loss over all of `validation`, in nats; the model is left in eval mode."""
    model.eval()
    x, y = validation
    loss: Callable[..., Tensor] = model.loss  # type: ignore[assignment]
    total = 0.0
    for start in range(0, len(x), _CHUNK):
        part = slice(start, start + _CHUNK)
        total += float(loss(x[part], y[part])) * len(x[part])
    return total / len(x)


class Pace:
    """Makes computing a replica last `seconds`: sleeps first what the forward and backward pass will not take.

    What they take is this process's processor time for them on a copy of the model, before the training: neither what
    encoding and sending cost nor waiting for a core is hidden in the sleep.
    """

    def __init__(self, seconds: float, model: nn.Module, batch: Any) -> None:
        self.computing = _computing_seconds(model, batch)
        self._sleep = max(0.0, seconds - self.computing)

    def keep(self) -> None:
        """Call it right before the forward pass."""
        time.sleep(self._sleep)


def _computing_seconds(model: nn.Module, batch: Any) -> float:
    trial = copy.deepcopy(model)
    seconds = []
    for _ in range(_CALIBRATIONS):
        began = time.thread_time()
        trial.loss(*batch).backward()  # type: ignore[operator]
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds[1:])  # the first one warms up
