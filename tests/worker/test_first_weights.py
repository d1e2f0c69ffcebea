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
from rallypoint.worker.exchange import exchange as initial
from rallypoint.worker.exchange.exchange import digest_of
from rallypoint.worker.tensors import ModelTensors


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
