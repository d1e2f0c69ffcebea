"""Samples that raise errors: read again, named, skipped or fatal."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from rallypoint.config import JobConfig, Reading
from rallypoint.data.loader import MicroBatches, ReadingAhead, to_device
from rallypoint.data.spec import Loader
from rallypoint.errors import DataError


class Flaky:
    """Samples (index, a random number), of which `broken` raise an error for their first so many reads."""

    def __init__(self, broken: dict[int, int]) -> None:
        self.broken, self.reads = broken, Counter[int]()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.reads[index] += 1
        drawn = random.random()
        if self.reads[index] <= self.broken.get(index, 0):
            raise OSError(f"no answer for {index}")
        return index, drawn


class AllAtOnce(Flaky):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [self[index] for index in indices]


def read(dataset: Any, **settings: Any) -> tuple[list[Any], list[str]]:
    return ReadingAhead(dataset, Loader(**settings)).read([5, 2, 7], seed=11)


@pytest.mark.parametrize("kind", [Flaky, AllAtOnce])
def test_a_sample_that_comes_at_the_second_try_changes_nothing(kind: type[Flaky]) -> None:
    undisturbed = read(kind({}))
    assert undisturbed[1] == []
    assert read(kind({2: 1})) == undisturbed, "also what the samples draw at random"
    assert read(kind({2: 1, 7: 1})) == undisturbed


@pytest.mark.parametrize("kind", [Flaky, AllAtOnce])
def test_a_sample_that_never_comes_is_named(kind: type[Flaky]) -> None:
    dataset = kind({2: 99})
    sentence = r"^sample 2 of the data set raised OSError: no answer for 2 \(test_reading\.py:\d+\)"
    with pytest.raises(DataError, match=sentence + r" \(3 times\): mend"):
        read(dataset)
    with pytest.raises(DataError, match=sentence + ": mend"):
        read(kind({2: 99}), retries=0)


@pytest.mark.parametrize("kind", [Flaky, AllAtOnce])
def test_a_sample_that_never_comes_is_skipped_where_that_is_asked_for(kind: type[Flaky]) -> None:
    samples, skipped = read(kind({2: 99}), on_error="skip")
    assert [index for index, _ in samples] == [5, 7]
    [said] = skipped
    assert said.startswith("sample 2 of the data set raised OSError: no answer for 2 (test_reading.py:")
    assert said.endswith("; it is left out of its batch")
    again, _ = read(kind({2: 99}), on_error="skip", retries=0)
    assert again == samples


def test_a_batch_of_which_nothing_is_left_is_an_error() -> None:
    with pytest.raises(DataError, match="raised OSError"):
        read(Flaky(dict.fromkeys((5, 2, 7), 99)), on_error="skip")


def test_skipped_samples_are_told_and_the_rest_is_collated() -> None:
    config = JobConfig(batch=4, steps=2, reading=Reading(order="sequential"))
    batches = MicroBatches(Flaky({2: 99}), config, torch.device("cpu"), loader=Loader(on_error="skip"))
    (indices, _), skipped = batches.loaded(0, 0, 0)
    assert indices.tolist() == [0, 1, 3]
    assert len(skipped) == 1
    assert batches.loaded(1, 0, 0)[1] == []


def test_a_batch_goes_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the main thread waits at each micro-batch for what the GPU computes."""
    log = list[str]()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: log.append("pin") or one)
    monkeypatch.setattr(torch.Tensor, "to", lambda one, device, non_blocking: log.append(f"to {device}") or one)
    to_device({"x": torch.ones(2), "ids": torch.ones(2).to_sparse()}, torch.device("cuda", 1))
    assert log == ["pin", "to cuda:1", "to cuda:1"]
    to_device(torch.ones(2), torch.device("cpu"))
    assert log[3:] == ["to cpu"]


def test_a_batch_that_can_move_itself_does_so() -> None:
    """A packed sequence keeps the lengths of its steps on the CPU."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = to_device({"x": packed, "y": [torch.ones(2)]}, torch.device("meta"))
    assert (moved["x"].data.is_meta, moved["x"].batch_sizes.is_meta, moved["y"][0].is_meta) == (True, False, True)
    assert to_device(packed, torch.device("cpu")).data.tolist() == packed.data.tolist()
