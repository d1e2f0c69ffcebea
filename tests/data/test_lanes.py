"""Streams of tokens side by side: each place of a batch reads on where it has stopped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rallypoint as rp
from rallypoint.config import resolve
from rallypoint.data.loader import MicroBatches
from rallypoint.data.spec import given
from rallypoint.errors import DataError, UsageError

CPU = torch.device("cpu")


def _batches(data: rp.Lanes, **settings: object) -> MicroBatches:
    return MicroBatches(data, resolve({**given(data).settings, **settings}), CPU)


def test_each_place_of_a_batch_reads_one_lane_from_its_beginning_to_its_end() -> None:
    data = rp.Lanes(torch.arange(100), length=4, lanes=6)  # 16 tokens in each: 3 windows
    assert (data.windows, len(data)) == (3, 18)
    batches = _batches(data, replicas=2, batch=3)
    for replica in range(2):
        for place in range(3):
            read = [batches.load(step, replica, 0) for step in range(4)]
            x, y = (torch.cat([one[part][place] for one in read]) for part in range(2))
            start = 16 * (3 * replica + place)
            assert x.tolist() == [*range(start, start + 12), *range(start, start + 4)]
            assert torch.equal(y, x + 1)
    assert [data.begins(step) for step in range(7)] == [True, False, False, True, False, False, True]


def test_the_lanes_are_those_of_pytorch_s_example() -> None:
    """word_language_model: batchify cuts the text into columns, get_batch takes rows."""
    text, lanes, length = torch.randint(0, 50, (203,)), 5, 7
    columns = text[: 203 // lanes * lanes].view(lanes, -1).t()
    data = rp.Lanes(text, length, lanes)
    for window in range(data.windows):
        for lane in range(lanes):
            x, y = data[window * lanes + lane]
            assert torch.equal(x, columns[window * length : (window + 1) * length, lane])
            assert torch.equal(y, columns[window * length + 1 : (window + 1) * length + 1, lane])


def test_an_array_of_any_whole_numbers_will_do() -> None:
    x, _ = rp.Lanes(np.arange(30, dtype=np.uint16), length=4, lanes=2)[3]
    assert x.dtype is torch.int64
    assert x.tolist() == [19, 20, 21, 22]
    assert x.is_contiguous()


@pytest.mark.parametrize(("settings", "says"), [
    ({"replicas": 2, "batch": 4}, "give lanes=8"),
    ({"replicas": 2, "batch": 3, "reading.order": "shuffled"}, "leave it out"),
    ({"replicas": 1, "batch": 6, "accumulate": 2}, "more replicas"),
], ids=["lanes", "order", "accumulate"])  # fmt: skip
def test_a_job_that_would_not_read_on_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(DataError, match=says):
        _batches(rp.Lanes(torch.arange(100), length=4, lanes=6), **settings)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(DataError, match="4 in each, and a window needs length"):
        rp.Lanes(torch.arange(12), length=4, lanes=3)
    with pytest.raises(UsageError, match="whole numbers in one row"):
        rp.Lanes(torch.zeros(12), length=1, lanes=1)
    with pytest.raises(UsageError, match="1 or more"):
        rp.Lanes(torch.arange(12), length=0, lanes=1)
    with pytest.raises(IndexError):
        rp.Lanes(torch.arange(12), length=1, lanes=1)[11]
