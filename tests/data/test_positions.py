"""The samples of many positions at once are those that `core/order.py` computes one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.order import SampleOrder
from rallypoint.data.order import AT_ONCE, REPLICAS, OrderAhead, SamplesOfWindows, samples_at

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
