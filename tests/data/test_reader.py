"""A part of a stream is read by number: forward, the newest items again, older ones by beginning anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rallypoint.data.dataset import NotASample
from rallypoint.data.stream import EndOfStream, StreamReader


class Counted:
    """A part of `length` items; counts how often it was opened and read, and raises where it is told to."""

    def __init__(self, length: int, *, bad: int = -1, times: int = 1 << 30) -> None:
        self.length, self.bad, self.times = length, bad, times
        self.opened = self.read = 0

    def __call__(self, epoch: int) -> Iterator[Any]:
        self.opened += 1
        for item in range(self.length):
            self.read += 1
            yield self.one(epoch, item)

    def one(self, epoch: int, item: int) -> tuple[int, int]:
        if item == self.bad and self.times:
            self.times -= 1
            raise OSError(f"item {item}")
        return epoch, item


class Sturdy(Counted):
    """Goes on after an error, as `map` does."""

    def __call__(self, epoch: int) -> Iterator[Any]:
        self.opened += 1
        return map(partial(self.one, epoch), range(self.length))


def reader_of(source: Any, *, passes: int = 0, keep: int = 6, part: int = 0, parts: int = 1) -> StreamReader:
    return StreamReader(source, part, parts, seed=3, passes=passes, keep=keep)


def test_items_go_on_from_pass_to_pass() -> None:
    reader = reader_of(Counted(5))
    assert reader.take([3, 4, 5, 6]) == [(0, 3), (0, 4), (1, 0), (1, 1)]
    assert reader.take([10]) == [(2, 0)]


def test_the_newest_items_are_given_again_without_reading() -> None:
    source = Counted(100)
    reader = reader_of(source)
    reader.take([8, 9])
    assert (reader.take([4, 5]), source.opened, source.read) == ([(0, 4), (0, 5)], 1, 10)
    assert (reader.take([3]), source.opened, source.read) == ([(0, 3)], 2, 14)


def test_a_list_that_a_transform_has_emptied_is_whole_again() -> None:
    reader = reader_of(lambda: iter([{"a": 1}, [2]]))
    first, second = reader.take([0, 1])
    first.clear(), second.clear()
    assert reader.take([0, 1]) == [{"a": 1}, [2]]


def test_the_end_is_known_before_and_says_how_many_there_were() -> None:
    reader = reader_of(Counted(5), passes=2)
    assert reader.has(9)
    assert not reader.has(10)
    assert reader.take([8, 9]) == [(1, 3), (1, 4)]
    with pytest.raises(EndOfStream, match="part 0 of the stream has ended after 10 items"):
        reader.take([9, 10])
    assert reader.take([0]) == [(0, 0)], "an older one is there all the same"


def test_an_empty_pass_is_no_endless_search() -> None:
    with pytest.raises(NotASample, match="no items in pass 0"):
        reader_of(Counted(0)).take([0])


def test_an_error_of_the_iterator_is_raised_and_the_next_try_begins_anew() -> None:
    source = Counted(9, bad=4, times=1)
    reader = reader_of(source)
    with pytest.raises(OSError, match="item 4"):
        reader.take([3, 4])
    assert (reader.take([3, 4]), source.opened) == ([(0, 3), (0, 4)], 2)


def test_an_error_at_an_item_that_is_only_looked_at_shows_when_it_is_taken() -> None:
    reader = reader_of(Sturdy(9, bad=4), passes=1)
    assert reader.has(5)
    assert reader.take([5]) == [(0, 5)]
    with pytest.raises(OSError, match="item 4"):
        reader.take([4])


def test_an_item_that_always_fails_is_passed_over_where_the_iterator_goes_on() -> None:
    reader = reader_of(Sturdy(9, bad=4))
    with pytest.raises(OSError, match="item 4"):
        reader.take([3, 4, 5])
    assert reader.take([3, 5]) == [(0, 3), (0, 5)]


def test_a_generator_that_its_error_has_ended_is_not_taken_for_the_end() -> None:
    reader = reader_of(Counted(9, bad=4), passes=1)
    assert reader.has(8), "nobody knows, so the job does not end in silence"
    with pytest.raises(NotASample, match="nothing after the error at its item 4: do what may fail in transform="):
        reader.take([3, 5])


def noisy(part: int) -> Iterator[Any]:
    while True:
        yield part, random.random(), float(np.random.rand()), float(torch.rand(1))


def test_what_the_iterator_draws_does_not_depend_on_what_else_runs() -> None:
    wanted = reader_of(noisy, keep=20).take(list(range(20)))
    reader = reader_of(noisy)
    for number in range(20):
        random.seed(number), np.random.seed(number), torch.manual_seed(number)
        before = random.getstate()
        assert reader.take([number]) == [wanted[number]]
        assert random.getstate() == before
    assert reader.take([7]) == [wanted[7]], "also when it has begun anew"
    assert reader_of(noisy, part=1).take([0])[0][1:] != wanted[0][1:]


class Split(IterableDataset[Any]):
    """Takes a part of its items as PyTorch's documentation shows it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for item in range(0, 8, 1) if info is None else range(info.id, 8, info.num_workers):
            yield self.epoch, item


def test_an_iterable_data_set_is_split_as_over_the_workers_of_a_loader() -> None:
    split = Split()
    assert reader_of(split).take([7, 8]) == [(0, 7), (1, 0)]
    assert [reader_of(split, part=part, parts=2).take([0, 3, 4]) for part in (0, 1)] == [
        [(0, 0), (0, 6), (1, 0)], [(0, 1), (0, 7), (1, 1)]
    ]  # fmt: skip
    assert get_worker_info() is None


class OfHub:
    """A streaming data set that is split by its own method, as Hugging Face's is."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.num_shards = numbers, 4

    def shard(self, num_shards: int, index: int) -> OfHub:
        return OfHub(self.numbers[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None, "else it would be split twice"
        yield from self.numbers


def test_a_data_set_that_shards_itself_is_split_once() -> None:
    assert reader_of(OfHub(range(8)), part=1, parts=2).take([0, 1, 2, 3]) == [1, 3, 5, 7]
