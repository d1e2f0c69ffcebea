"""order="windowed": what a data set must tell for it, and what workers compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from rallypoint.config import JobConfig, Reading
from rallypoint.config.resolve import record_of, resolve
from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.data.identity import identity_of
from rallypoint.data.loader import MicroBatches
from rallypoint.errors import ConfigError, DataError

CPU = torch.device("cpu")


class Cut(list[int]):
    """A list that tells shards."""

    def __init__(self, values: Any, lengths: list[int]) -> None:
        super().__init__(values)
        self.lengths = lengths

    def shard_lengths(self) -> list[int]:
        return self.lengths


def test_an_attribute_of_that_name_is_no_shards() -> None:
    class Other(list[int]):
        shard_lengths = (1, 2)

    assert identity_of(Other(range(3))).shards == ""
    with pytest.raises(DataError, match="Other does not tell them"):
        batches(Other(range(3)))


def batches(dataset: Any, **settings: Any) -> MicroBatches:
    return MicroBatches(dataset, JobConfig(batch=4, steps=5, reading=Reading(order="windowed", **settings)), CPU)


def test_one_shard_after_the_other_is_read_where_one_is_mixed() -> None:
    cut = batches(Cut(range(20), [4, 0, 12, 4]), mixed_shards=1)
    read = [set(cut.load(step, 0, 0).tolist()) for step in range(5)]
    assert {0, 1, 2, 3} in read
    assert {16, 17, 18, 19} in read
    assert set().union(*read) == set(range(20))


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ([1, 2, 3], "shuffles the shards of a data set, and a list does not tell them: give rp.Parquet"),
        (Subset(Cut([1, 2], [2]), [0, 1]), "a Subset does not tell them"),
        (Cut([1, 2, 3], [1, 1]), "the sum is 2, the length 3"),
        (Cut([1, 2, 3], [4, -1]), "must be numbers of samples"),
    ],
)
def test_a_data_set_that_does_not_tell_its_shards_is_refused(dataset: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        batches(dataset)


def test_no_shards_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match="mixed_shards"):
        resolve({"reading.mixed_shards": 0})


def test_workers_whose_shards_differ_are_told_so() -> None:
    layout = build_layout([TensorSpec("weight", (4,), "float32", 0)])

    def record(dataset: Any) -> JobRecord:
        return record_of(resolve({}), layout, data=identity_of(dataset))

    first, other = record(Cut([1, 2, 3], [1, 2])), record(Cut([1, 2, 3], [2, 1]))
    assert disagreement(first, first) is None
    assert "its shards (files, row groups) have other lengths or sizes" in str(disagreement(first, other))
    assert disagreement(first, record([1, 2, 3])) is None
