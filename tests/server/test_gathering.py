"""What tests take for granted of `gathering.py`."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from gathering import build

from rallypoint.worker.tensors import weights_hash


def test_all_workers_begin_with_the_same_weights_whatever_other_threads_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's generator is the process's, and each micro-batch of another worker seeds it."""
    seeds, reset = count(1), torch.nn.Linear.reset_parameters

    def disturbed(layer: torch.nn.Linear) -> None:
        torch.manual_seed(next(seeds))  # as another thread may, between any two lines of this one
        reset(layer)

    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", disturbed)
    assert weights_hash(build()) == weights_hash(build())
