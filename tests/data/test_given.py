"""What `job.train` takes over of a DataLoader, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import rallypoint as rp
from rallypoint.config import JobConfig
from rallypoint.data.loader import MicroBatches
from rallypoint.data.spec import given
from rallypoint.errors import DataError, UsageError

DATA = TensorDataset(torch.arange(12.0))


def collate(samples: list[Any]) -> int:
    return len(samples)


def begin(number: int) -> None:
    """Does nothing."""


def test_a_data_set_is_taken_as_it_is() -> None:
    data = given(DATA, collate, rp.Loader(workers=3))
    assert (data.dataset, data.collate, data.loader, data.settings) == (DATA, collate, rp.Loader(workers=3), {})


class WithPositions(IterableDataset[int]):
    """As the data sets of LitData and MosaicML are, which read stores."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it is read by its positions")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return 10 * index


def test_an_iterable_data_set_that_has_positions_is_taken_in_a_subset() -> None:
    data = given(Subset(WithPositions(), range(12)))
    config = JobConfig(replicas=1, batch=12, steps=1, seed=1, **data.settings)
    batch = MicroBatches(data.dataset, config, torch.device("cpu")).load(0, 0, 0)
    assert sorted(batch.tolist()) == list(range(0, 120, 10))


def test_a_data_loader_says_all_that_it_can() -> None:
    loader = DataLoader(
        DATA, batch_size=5, shuffle=True, collate_fn=collate, num_workers=2, worker_init_fn=begin,
        multiprocessing_context="spawn",
    )  # fmt: skip
    data = given(loader)
    assert (data.dataset, data.collate) == (DATA, collate)
    assert data.settings == {"batch": 5, "reading.order": "shuffled"}
    assert data.loader == rp.Loader(workers=2, init=begin, start="spawn")
    assert given(loader, loader=rp.Loader()).loader == rp.Loader(), "what is said beside it comes first"


@pytest.mark.parametrize(
    ("sampler", "order"),
    [
        (None, "sequential"),
        (RandomSampler(DATA), "shuffled"),
        (DistributedSampler(DATA, num_replicas=4, rank=1), "shuffled"),
        (DistributedSampler(DATA, num_replicas=4, rank=1, shuffle=False), "sequential"),
    ],
)
def test_the_order_is_that_of_its_sampler(sampler: Any, order: str) -> None:
    data = given(DataLoader(DATA, batch_size=2, sampler=sampler))
    assert data.settings["reading.order"] == order
    assert data.dataset is DATA, "the job itself distributes it"
    assert data.collate is None


def test_a_subset_stays_one() -> None:
    data = given(DataLoader(DATA, sampler=SubsetRandomSampler([3, 7, 9])))
    assert [data.dataset[i] for i in range(3)] == [DATA[3], DATA[7], DATA[9]]
    assert len(data.dataset) == 3


class Backwards(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(11, -1, -1))


class Hard(RandomSampler):
    def __iter__(self) -> Any:
        return iter([11] * len(self))


class Own(DistributedSampler[Any]):
    def __iter__(self) -> Any:
        return iter([11] * len(self))


class Twos(BatchSampler):
    pass


class Halved(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch[0] / 2 for batch in super().__iter__())


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (DataLoader(DATA, sampler=Backwards()), "a DataLoader with a Backwards was given: .*Subset"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 12, 12)), "a WeightedRandomSampler was given"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "a RandomSampler was given"),
        (DataLoader(DATA, sampler=SequentialSampler(range(5))), "a SequentialSampler was given"),
        (DataLoader(DATA, sampler=Hard(DATA)), "a Hard was given: .* so often and in that order"),
        (DataLoader(DATA, sampler=Own(DATA, 2, 0)), "a Own was given: .* so often and in that order"),
        (DataLoader(DATA, batch_size=None), "or without batches, was given"),
        (DataLoader(DATA, batch_sampler=Twos(RandomSampler(DATA), 2, False)), "with a batch sampler of its own"),
        (Halved(DATA), "a Halved was given, a DataLoader that does something of its own with its batches"),
    ],
    ids=["own", "weighted", "replacement", "a part", "hard", "split", "no batches", "batch sampler", "own batches"],
)
def test_what_the_job_cannot_compute_is_refused(loader: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        given(loader)


@pytest.mark.parametrize("wrong", [{"workers": -1}, {"ahead": 0}, {"retries": -1}, {"on_error": "ignore"}])
def test_a_loader_that_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=rf"rp\.Loader\({next(iter(wrong))}="):
        rp.Loader(**wrong)


def test_a_data_loader_in_the_place_of_a_loader_is_refused() -> None:
    wrong: Any = DataLoader(DATA)
    with pytest.raises(UsageError, match=r"loader= is a DataLoader: give rp.Loader\(workers=4\)"):
        given(DATA, loader=wrong)


@pytest.mark.parametrize(("batch", "order", "told"), [(4, "shuffled", False), (5, "shuffled", True), (5, "own", False)])
def test_a_step_that_takes_more_samples_than_there_are_is_told_of(
    batch: int, order: Any, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in a loop of the script's own (``rp.wrap``), whose data the job does not see."""
    reading = rp.Reading(order=order)
    MicroBatches(DATA, JobConfig(replicas=3, batch=batch, steps=1, reading=reading), torch.device("cpu"))
    assert ("a step takes 15 samples, and the data set has 12" in caplog.text) == told
