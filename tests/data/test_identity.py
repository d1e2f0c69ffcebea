"""What workers compare of their data sets: the length, and a few samples, without a false alarm."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.config import record_of, resolve
from rallypoint.core.job import DataIdentity, JobRecord, disagreement
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.order import SampleOrder
from rallypoint.data.identity import identity_of
from rallypoint.data.order import AT_ONCE, REPLICAS, OrderAhead, SamplesOfWindows, samples_at

LAYOUT = build_layout([TensorSpec("weight", (40,), "float32", 0)])


def record(data: DataIdentity) -> JobRecord:
    return record_of(resolve({}), LAYOUT, data=data)


def difference(first: Any, other: Any) -> str | None:
    return disagreement(record(identity_of(first)), record(identity_of(other)))


class Drawn:
    """A data set that makes its samples when they are asked for."""

    def __init__(self, sample: Callable[[int], Any], length: int = 50) -> None:
        self._sample, self._length = sample, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._sample(index)


def test_another_length_is_refused() -> None:
    why = difference(list(range(200)), list(range(210)))
    assert why.startswith("a different data set: 210 samples here, 200 there: load the same files on every worker")


def test_other_content_is_refused_by_the_first_sample_that_differs() -> None:
    samples = torch.arange(120.0).view(40, 3)
    other = samples.clone()
    other[39, 2] += 1e-6
    assert difference(samples, samples.clone()) is None
    why = difference(torch.utils.data.TensorDataset(samples), torch.utils.data.TensorDataset(other))
    assert why is None, "39 + 1e-6 is 39 in fp32"
    other[39, 2] += 1.0
    why = difference(torch.utils.data.TensorDataset(samples), torch.utils.data.TensorDataset(other))
    assert why.startswith("a different data set: sample 39 has other content: load the same files in the same order")


def test_a_split_that_is_not_seeded_is_refused() -> None:
    whole = list(range(1000))
    first, other = (torch.utils.data.random_split(whole, [900, 100])[0] for _ in range(2))
    assert "seed a random split" in str(difference(first, other))


@pytest.mark.parametrize("draw", [
    lambda i: i + random.random(), lambda i: i + np.random.rand(3), lambda i: {"x": torch.rand(2), "y": i},
], ids=["python", "numpy", "torch"])  # fmt: skip
def test_augmentation_from_the_global_generators_is_compared(draw: Callable[[int], Any]) -> None:
    random.seed(1)
    first = identity_of(Drawn(draw))
    random.seed(2)
    torch.manual_seed(2)
    assert first == identity_of(Drawn(draw))
    assert len(first.digests) == 8


def test_a_sample_with_randomness_of_its_own_is_no_disagreement_and_said(caplog: pytest.LogCaptureFixture) -> None:
    one, two = np.random.default_rng(1), np.random.default_rng(2)
    first, other = Drawn(lambda i: one.random(3)), Drawn(lambda i: two.random(3))
    assert identity_of(first) == DataIdentity(50)
    assert "a random generator of its own" in caplog.text
    assert difference(first, other) is None


def test_samples_that_cannot_be_compared_are_said_and_only_their_number_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, other = Drawn(lambda i: object()), Drawn(lambda i: [1, object()])
    assert difference(first, other) is None
    assert caplog.messages[0].startswith("workers cannot compare samples that hold a object: ")
    assert "samples here" in str(difference(first, Drawn(lambda i: object(), 49)))


@dataclass
class Pair:
    x: torch.Tensor
    label: Any


class Picture:
    """What PIL's images are to NumPy."""

    def __init__(self, value: int) -> None:
        self.__array_interface__ = np.full((2, 2), value).__array_interface__


class Cut:
    """A picture whose file is cut: it is read when somebody looks at it."""

    @property
    def __array_interface__(self) -> Any:
        raise OSError("image file is truncated")


def test_a_sample_that_fails_when_it_is_looked_at_is_left_to_training() -> None:
    unset, circle = object.__new__(Pair), Pair(torch.ones(1), [])
    circle.label.append(circle)
    for sample in (unset, circle, Cut()):
        assert identity_of(Drawn(lambda i, sample=sample: sample)) == DataIdentity(50)  # type: ignore[misc]


def test_objects_of_a_split_that_is_not_seeded_are_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    whole = [Pair(torch.full((3,), float(i)), UserDict(at=Picture(i))) for i in range(500)]
    first, other = (torch.utils.data.random_split(whole, [400, 100])[0] for _ in range(2))  # type: ignore[arg-type]
    assert "seed a random split" in str(difference(first, other))
    assert difference(first, first) is None
    assert not caplog.messages


def test_all_that_default_collate_takes_has_a_digest() -> None:
    everything = {
        "t": torch.ones(2, 3).t(), "half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.empty(0), "flag": True,
        "n": np.float32(2), "a": np.arange(3), "text": "words", "raw": b"bytes", "none": None, "list": [1, (2.5, "x")],
    }  # fmt: skip
    assert len(identity_of(Drawn(lambda i: everything)).digests) == 8


def test_looking_at_the_data_leaves_randomness_as_it_was() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    identity_of(Drawn(lambda i: (torch.rand(2), random.random(), np.random.rand())))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_a_short_data_set_is_read_where_it_has_samples(length: int) -> None:
    positions = [position for position, _ in identity_of(list(range(length))).digests]
    assert positions == list(range(length)) or (len(positions) == 8 and positions[-1] == length - 1)


def test_a_record_of_before_that_has_no_data_agrees_with_any() -> None:
    assert disagreement(record(DataIdentity()), record(identity_of([1, 2]))) is None
    assert disagreement(record(identity_of([1, 2])), record(DataIdentity())) is None


# ---- The samples of many positions at once are those that core/order.py computes one by one ----


_SEEDS = st.integers(0, 2**63 - 1)


@given(
    st.one_of(st.integers(1, 300), st.integers(2**21, 2**25), st.integers(2**31, 2**50)), _SEEDS,
    st.integers(0, 2**40), st.integers(1, 400), st.booleans(),
)  # fmt: skip
def test_positions_at_once_equal_positions_one_by_one(
    samples: int, seed: int, start: int, count: int, shuffled: bool
) -> None:
    def fresh() -> SampleOrder:
        return SampleOrder(seed=seed, samples=samples, replicas=1, batch=1, shuffled=shuffled)

    one_by_one = fresh()
    expected = [one_by_one.samples(position, 0)[0] for position in range(start, start + count)]
    assert samples_at(fresh(), np.arange(start, start + count, dtype=np.uint64)) == expected


@pytest.mark.slow
@given(st.integers(1, 5000), st.integers(1, 9), st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 8))), _SEEDS)
def test_a_replicas_steps_are_the_same_in_whatever_order_they_are_asked_for(
    samples: int, batch: int, places: list[tuple[int, int]], seed: int
) -> None:
    order = SampleOrder(seed=seed, samples=samples, replicas=9, batch=batch)
    ahead = OrderAhead(SampleOrder(seed=seed, samples=samples, replicas=9, batch=batch), batch)
    for step, replica in places:
        for near in (step, step + 1, step):
            assert ahead.samples(near, replica) == order.samples(near, replica)


def test_what_is_computed_ahead_is_bounded() -> None:
    ahead = OrderAhead(SampleOrder(seed=0, samples=10**9, replicas=10**6, batch=2), 2)
    for replica in range(3 * REPLICAS):
        ahead.samples(7, replica)
    windows = ahead._windows
    assert len(windows) <= REPLICAS
    assert all(len(samples) <= AT_ONCE for _, samples in windows.values())


def test_a_tiny_data_set_is_not_permuted_for_hundreds_of_epochs_at_once() -> None:
    order, epochs = SampleOrder(seed=0, samples=40, replicas=5, batch=1), set[int]()
    of_epoch = order.permutation
    order.permutation = lambda epoch: (epochs.add(epoch), of_epoch(epoch))[1]  # type: ignore[method-assign]
    OrderAhead(order, 1).samples(0, 0)
    assert len(epochs) <= 17


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_without_shuffling_a_pass_is_the_data_sets_own_order(batch: int) -> None:
    order = SampleOrder(seed=3, samples=7, replicas=2, batch=batch, shuffled=False)
    stream = [sample for step in range(7) for replica in range(2) for sample in order.samples(step, replica)]
    assert stream == [position % 7 for position in range(14 * batch)]


@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 400)), min_size=1, max_size=20).filter(any),
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 12), st.integers(0, 3000), _SEEDS,
)  # fmt: skip
def test_windows_at_once_equal_windows_one_by_one(
    lengths: list[int], replicas: int, batch: int, mixed: int, step: int, seed: int
) -> None:
    def fresh() -> SampleOrder:
        return SampleOrder(seed=seed, samples=sum(lengths), replicas=replicas, batch=batch, shards=lengths, mixed=mixed)

    one_by_one, at_once = fresh(), SamplesOfWindows(fresh())
    for replica in range(replicas):
        positions = [p for each in range(step, step + 12) for p in one_by_one.positions(each, replica)]
        expected = [s for each in range(step, step + 12) for s in one_by_one.samples(each, replica)]
        assert at_once.at(np.array(positions, np.uint64)) == expected


def test_windows_of_a_huge_data_set_are_computed_ahead() -> None:
    """10^9 samples in shards of very different sizes, far into the tenth pass."""
    lengths = [1 + (17 * shard) % 199_999 for shard in range(10_000)]
    order = SampleOrder(seed=1, samples=sum(lengths), replicas=8, batch=64, shards=lengths, mixed=16)
    step = 10 * sum(lengths) // (8 * 64) + 12_345
    assert OrderAhead(order, 64).samples(step, 3) == order.samples(step, 3)
