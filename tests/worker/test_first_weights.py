"""The digest of the first weights: of all words, wherever they are cut, and in one walk over the tensors."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
import xxhash

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.errors import UsageError
from rallypoint.worker.exchange import exchange as initial
from rallypoint.worker.exchange.exchange import digest_of
from rallypoint.worker.kernels import kernels_of
from rallypoint.worker.loop.guard import Comparison
from rallypoint.worker.tensors import ModelTensors
from support.training import train


def tensors_of(layers: int) -> ModelTensors:
    """So many parameters of several shapes, one of them empty, and as many buffers."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    for number in range(layers):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.randn(number % 5 + 1, 3)))
        model.register_buffer(f"b{number}", torch.randn(number % 3 + 1))
    model.register_parameter("none", torch.nn.Parameter(torch.empty(0, 3)))
    return ModelTensors(model, resolve({"steps": 1, "batch": 1, "optimizer": rp.SGD(lr=0.1)}, {}))


@pytest.mark.parametrize("at_once", [1 << 20, 4])
def test_the_digest_is_of_every_tensor_s_words_in_order(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "_AT_ONCE", at_once)
    tensors = tensors_of(20)
    digest = xxhash.xxh3_128()
    by_place = sorted((*tensors.parameters, *tensors.buffers), key=lambda placed: placed.entry.start)
    for placed in by_place:
        digest.update(placed.words().numpy().tobytes())
    assert digest_of(tensors.layout, tensors.part) == digest.digest()
    whole = tensors.part(0, tensors.layout.words)
    for placed in by_place:
        assert torch.equal(whole[placed.entry.start : placed.entry.stop], placed.words())


def lines_of(layers: int) -> int:
    """How many lines of Python the digest of so many layers takes."""
    tensors, count = tensors_of(layers), 0

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        digest_of(tensors.layout, tensors.part)
    finally:
        sys.settrace(before)
    return count


def test_the_digest_of_many_tensors_takes_no_more_for_each() -> None:
    assert lines_of(400) < 2.5 * lines_of(200)


# ---- The probe of a process's kernels: the same bytes each time, other bytes from other kernels ----


def test_a_probe_gives_the_same_bytes_each_time_and_moves_nothing() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        first = kernels_of()
    assert len(first) == 16
    assert kernels_of() == first
    assert torch.equal(torch.get_rng_state(), before)


def test_kernels_that_add_up_in_another_way_are_told_apart() -> None:
    """Another number of threads cuts sums in another way."""
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            found.append(kernels_of())
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[2] != found[1]


# ---- Comparing tensors with what they were, at once or when a device has got to it ----


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
