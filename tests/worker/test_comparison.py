"""Comparing tensors with what they were, at once or when a device has got to it."""

from __future__ import annotations

import pytest
import torch

import rallypoint as rp
from rallypoint.errors import UsageError
from rallypoint.worker.loop.guard import Comparison
from support.training import train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (5, 7), (16, 16)], ids=str)
def test_one_element_that_changes_is_found(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = [torch.ones(shape, dtype=dtype) for _ in range(3)]
    comparison = Comparison(tensors)
    tensors[1].view(-1)[-1] = 0
    comparison.end()
    assert comparison.ready
    assert comparison.changed() == [1]


def test_what_stays_or_comes_back_is_no_change() -> None:
    tensors = [torch.randn(9), torch.empty(0), torch.empty(4, device="meta"), torch.randn(40)[3:30:2]]
    comparison = Comparison(tensors)
    tensors[0].mul_(2).div_(2)
    comparison.end()
    assert comparison.changed() == []


def test_a_parameter_that_is_every_second_element_of_something_is_trained() -> None:
    model = torch.nn.Linear(3, 2)
    model.bias = torch.nn.Parameter(torch.zeros(4)[::2])
    train(model, steps=2)
    assert model.bias.abs().sum() > 0


def test_parts_of_one_memory_at_odd_places_are_compared() -> None:
    memory = torch.zeros(21, dtype=torch.int8)
    tensors = [memory[1:10], memory[11:21]]
    comparison = Comparison(tensors)
    memory[20] = 1
    comparison.end()
    assert comparison.changed() == [1]


def test_a_gpus_comparison_is_read_later_and_names_the_step_of_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the device: what it finds of step 1 is read when it has it, at step 5 here."""
    seen: list[int] = []
    monkeypatch.setattr(Comparison, "ready", property(lambda comparison: seen[-1] >= 5))
    model = torch.nn.Linear(3, 2)

    def halve(micro: rp.Micro) -> None:
        if micro.step == 1:
            model.weight.data.mul_(0.5)

    with pytest.raises(UsageError, match=r"parameter weight was changed at step 1 by the script"):
        train(model, steps=8, before=lambda micro: seen.append(micro.step), after=halve)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_what_a_gpu_has_not_said_by_the_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparison, "ready", False)
    model = torch.nn.Linear(3, 2)

    def change(micro: rp.Micro) -> None:
        if micro.step == 1:
            model.bias.data.add_(1.0)

    with pytest.raises(UsageError, match=r"parameter bias was changed at step 1 by the script"):
        train(model, after=change)


def test_an_evaluations_comparison_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparison, "ready", False)
    model, seen = torch.nn.Linear(3, 2), list[int]()

    def halve(step: int) -> None:
        model.weight.data.mul_(0.5)

    with pytest.raises(UsageError, match=r"parameter weight was changed at step 2 by the script"):
        train(model, steps=8, evaluate=halve, every=2, before=lambda micro: seen.append(micro.step))
    assert seen == [0, 1]
