"""Figures of micro-batches, and the learning rate, in the event log."""

from __future__ import annotations

import copy
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rallypoint as rp
from rallypoint.errors import UsageError
from rallypoint.launch.embedded import EmbeddedJob

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).view(32, 3))


def steps_logged(folder: Path, value: Any, **settings: Any) -> list[dict[str, Any]]:
    model = torch.nn.Linear(3, 2)
    with EmbeddedJob(folder=str(folder)) as job:
        for micro in job.train(model, DATA, **{"batch": 4, "steps": 3, "replicas": 2, **settings}):
            with micro:
                micro.log(figure=value(micro))
                micro.backward(model(micro.batch[0]).square().mean(), weight=1.0 + micro.replica)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["type"] == "StepDone"]


def test_a_figure_is_averaged_over_micro_batches_and_replicas(tmp_path: Path) -> None:
    def value(micro: Any) -> torch.Tensor:
        return torch.tensor(float(10 * micro.step + micro.replica + 0.5 * micro.index))

    steps = steps_logged(tmp_path, value, accumulate=2)
    assert [step["figures"]["figure"] for step in steps] == [
        pytest.approx(10 * step + (0.25 + 2 * 1.25) / 3) for step in range(3)
    ]


def test_a_tensor_that_is_written_anew_is_logged_as_it_was(tmp_path: Path) -> None:
    """A running sum; or what a CUDA graph returns, which is the same memory for each micro-batch."""
    total = torch.zeros(())
    steps = steps_logged(tmp_path, lambda micro: total.add_(1.0), accumulate=2)
    expected = [4 * step + (1.5 + 2 * 3.5) / 3 for step in range(3)]
    assert [step["figures"]["figure"] for step in steps] == pytest.approx(expected)


@pytest.mark.parametrize("logs", [True, False], ids=["figure", "loss"])
def test_micro_batches_of_plus_and_of_minus_infinity_have_a_mean_that_is_no_number(logs: bool, tmp_path: Path) -> None:
    """The script went on with such losses in plain PyTorch, and does so here if it says so."""
    model, infinite = torch.nn.Linear(3, 2), [-math.inf, math.inf]
    with EmbeddedJob(folder=str(tmp_path)) as job:
        for micro in job.train(model, DATA, batch=4, steps=3, accumulate=2, nonfinite="skip"):
            with micro:
                micro.log(figure=infinite[micro.index])
                loss = model(micro.batch[0]).square().mean()
                micro.backward(loss if logs or micro.step != 1 else loss + infinite[micro.index])
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["type"] == "Skipped"] == [] if logs else [1]
    assert [event["step"] for event in events if event["type"] == "StepDone"] == [0, 1, 2]


def test_so_is_the_loss_of_a_pass_that_is_not_the_last(tmp_path: Path) -> None:
    model, first = torch.nn.Linear(3, 2), list[float]()
    with EmbeddedJob(folder=str(tmp_path)) as job:
        for micro in job.train(model, DATA, batch=4, steps=2):
            with micro:
                loss = model(micro.batch[0]).square().mean()
                micro.backward(loss, more=True)
                first.append(float(loss.detach()))
                loss.detach().zero_()
                micro.backward(0.0 * model(micro.batch[0]).sum())
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["loss"] for event in events if event["type"] == "StepDone"] == pytest.approx(first)


def test_each_step_has_its_learning_rate(tmp_path: Path) -> None:
    steps = steps_logged(tmp_path, lambda micro: 1, optimizer=rp.SGD(lr=rp.linear(0.2, warmup=2)))
    assert [step["lr"] for step in steps] == pytest.approx([0.1, 0.2, 0.2])


NUMBERS = [np.float32(0.5), np.float16(0.5), np.array(0.5), Fraction(1, 2), torch.full((1, 1), 0.5)]


@pytest.mark.parametrize("value", NUMBERS)
def test_one_number_of_any_kind_is_logged(tmp_path: Path, value: Any) -> None:
    steps = steps_logged(tmp_path, lambda micro: value)
    assert [step["figures"]["figure"] for step in steps] == [0.5] * 3


@pytest.mark.parametrize(("name", "sentence"), [
    ("two\nlines", r"micro\.log got the name 'two\\nlines': a name has at most 200 characters, and each is printable"),
    ("x" * 201, r"micro\.log got a name of 201 characters, 'x{20}'\.\.\.: a name has at most 200"),
])  # fmt: skip
def test_a_name_that_cannot_be_shown_is_refused_as_such(name: str, sentence: str) -> None:
    model = torch.nn.Linear(3, 2)
    with EmbeddedJob() as job:
        micro = next(iter(job.train(model, DATA, batch=4, steps=3)))
        with pytest.raises(UsageError, match=sentence):
            micro.log(**{name: 0.5})


@pytest.mark.parametrize("value", [torch.ones(2), "much", None, np.str_("0.5"), np.ones(2), 1j, torch.tensor(1j)])
def test_what_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UsageError, match=r"micro.log\(figure=...\) got a"):
        steps_logged(tmp_path, lambda micro: value)


@pytest.mark.parametrize("clip", [1e9, 0.01, None])
def test_the_norm_of_the_mean_gradient_before_clipping_is_written_down_where_the_job_clips(
    tmp_path: Path, clip: float | None
) -> None:
    model = torch.nn.Linear(3, 2)
    twins = [copy.deepcopy(model) for _ in range(3)]  # of each step: with a rate of 0 the model stays as it is
    settings: dict[str, Any] = {"clip": clip, "optimizer": rp.SGD(lr=0.0)}
    with EmbeddedJob(folder=str(tmp_path)) as job:
        for micro in job.train(model, DATA, batch=4, steps=3, replicas=2, **settings):
            with micro:
                micro.backward(model(micro.batch[0]).square().mean(), weight=1.0 + micro.replica)
            (twins[micro.step](micro.batch[0]).square().mean() * (1.0 + micro.replica) / 3.0).backward()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    norms = [event["norm"] for event in events if event["type"] == "Applied"]
    gradients = [torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]) for twin in twins]
    expected = [None] * 3 if clip is None else [pytest.approx(float(g.norm()), rel=1e-5) for g in gradients]
    assert norms == expected
