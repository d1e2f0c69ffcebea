"""What the training benchmark makes of its members' words, and the limit that it sets beside."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # its modules import one another by name

from cluster import Case
from rallypoint.recipes.gpt_model import GPTConfig
from train import by_step
from train_member import Result, Task, model_of


def test_a_step_begins_with_its_last_worker_wherever_its_replicas_are() -> None:
    before = Result(steps=[0, 1, 2, 2], began=[0.0, 1.0, 2.0, 2.7], losses=[4.0, 3.0, 2.0, 1.0], peak_bytes=0)
    moved = Result(steps=[0, 1], began=[0.5, 0.9], losses=[6.0, 5.0], peak_bytes=0)
    assert by_step([before, moved]) == ([0.5, 1.0, 2.0], [5.0, 4.0, 1.5])


@pytest.mark.parametrize(
    ("case", "copies", "seconds"),
    [
        (Case(4, 4, None), 4, 0.0),
        (Case(4, 4, 1000.0), 0, 0.8),
        (Case(4, 4, 1000.0), 4, 0.8),
        (Case(4, 4, 1000.0), 5, 1.0),  # with replication servers carry every gradient once more
        (Case(4, 5, 1000.0), 5, 0.8),
        (Case(4, 4, 1000.0, 1250.0), 5, 0.8),
        (Case(4, 2, 1000.0), 4, 1.6),
    ],
)
def test_a_step_takes_at_least_what_the_busiest_link_takes(case: Case, copies: int, seconds: float) -> None:
    assert case.wire_seconds(100_000_000, copies) == pytest.approx(seconds)


def test_an_accelerator_sleeps_in_both_passes_and_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    tokens = torch.arange(8)[None]
    found = []
    for seconds in (0.0, 0.75):
        model = model_of(Task("alone", 0, 1, GPTConfig(layers=2, heads=2, width=16, block=8), {}, seconds))
        model.loss(tokens, tokens).backward()  # type: ignore[no-untyped-call]
        found.append([parameter.grad for parameter in model.parameters()])
    # A third in attention, the rest in the MLP.
    assert slept == pytest.approx([0.25, 0.5, 0.25, 0.5, 1.0, 0.5, 1.0, 0.5])
    assert all(torch.equal(plain, slow) for plain, slow in zip(*found, strict=True))
