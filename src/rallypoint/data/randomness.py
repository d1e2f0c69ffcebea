"""Python's, NumPy's and torch's global random generators: seeded by position, restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's (all devices') global generators."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    if _accelerated():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # a hundredth of the time, which counts at 10^5 samples a second


@cache
def _accelerated() -> bool:
    """True if there is a device with generators of its own."""
    return torch.accelerator.is_available()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all global generators for the body, then restore their states."""
    with untouched():
        seed_everything(seed)
        yield


@contextmanager
def untouched() -> Iterator[None]:
    """Restore the states of all global generators after the body."""
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        if cuda:
            torch.cuda.set_rng_state_all(devices)
