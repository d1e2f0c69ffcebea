"""Position is a number (I6): the sample order is a function of (seed, step, replica) and nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.core import order as orders
from rallypoint.core.order import Items, Permutation, SampleOrder, StreamOrder, derive_seed, stream_reads, stream_unread
from rallypoint.core.view import assign_replicas

_KEYS = st.integers(0, 2**63 - 1)


@given(st.integers(1, 1500), _KEYS)
def test_a_permutation_is_a_bijection(n: int, key: int) -> None:
    permutation = Permutation(n, key)
    assert sorted(permutation(i) for i in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4096, 4097])
def test_a_permutation_is_a_bijection_around_powers_of_four(n: int) -> None:
    permutation = Permutation(n, 7)
    assert sorted(permutation(i) for i in range(n)) == list(range(n))


@given(st.integers(2**20, 2**50), _KEYS, st.data())
def test_a_huge_permutation_needs_no_table_and_does_not_collide(n: int, key: int, data: st.DataObject) -> None:
    permutation = Permutation(n, key)
    indices = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=20))
    values = [permutation(i) for i in indices]
    assert len(set(values)) == len(indices)
    assert all(0 <= value < n for value in values)


@given(st.integers(1, 1000), st.integers(0, 1000))
def test_an_index_outside_is_an_error(n: int, beyond: int) -> None:
    for index in (-1 - beyond, n + beyond):
        with pytest.raises(IndexError):
            Permutation(n, 0)(index)


def test_a_permutation_of_nothing_is_impossible() -> None:
    with pytest.raises(ValueError, match="impossible"):
        Permutation(0, 0)


def test_a_permutation_shuffles() -> None:
    permutation = Permutation(1000, 3)
    values = [permutation(i) for i in range(1000)]
    assert sum(value == i for i, value in enumerate(values)) < 10  # one fixed point is expected
    assert 400 < sum(b > a for a, b in pairwise(values)) < 600
    assert values != [Permutation(1000, 4)(i) for i in range(1000)]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**32), st.integers(1, 3))
def test_every_epoch_uses_every_sample_exactly_once_across_steps_and_replicas(
    samples: int, replicas: int, batch: int, seed: int, epochs: int
) -> None:
    order = SampleOrder(seed=seed, samples=samples, replicas=replicas, batch=batch)
    steps = -(-epochs * samples // (replicas * batch))
    stream = [s for step in range(steps) for replica in range(replicas) for s in order.samples(step, replica)]
    assert len(stream) == steps * replicas * batch
    for epoch in range(epochs):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5), st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_samples_of_a_replica_do_not_depend_on_who_asks_nor_on_what_was_asked_before(
    samples: int, replicas: int, batch: int, workers: int, random: object
) -> None:
    def fresh() -> SampleOrder:
        return SampleOrder(seed=5, samples=samples, replicas=replicas, batch=batch)

    expected = {(t, r): fresh().samples(t, r) for t in range(6) for r in range(replicas)}
    seen = {}
    for replicas_of_worker in assign_replicas(replicas, [f"w{i}" for i in range(workers)]).values():
        own = fresh()
        places = [(t, r) for t in range(6) for r in replicas_of_worker]
        random.shuffle(places)  # type: ignore[attr-defined]
        seen |= {(t, r): own.samples(t, r) for t, r in places}
    assert seen == expected


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch(seed: int, number: int) -> tuple[int, ...]:
        order = SampleOrder(seed=seed, samples=50, replicas=5, batch=10)
        return tuple(s for replica in range(5) for s in order.samples(number, replica))

    assert len({epoch(seed, number) for seed in range(4) for number in range(4)}) == 16


def test_derived_seeds_are_distinct_stable_and_fit_in_63_bits() -> None:
    places = [("compute", t, r, m) for t in range(20) for r in range(20) for m in range(5)]
    seeds = [derive_seed(seed, *place) for seed in (0, 1, 2**40) for place in places]
    assert max(Counter(seeds).values()) == 1
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "compute", 1, 23) != derive_seed(0, "compute", 12, 3)
    assert derive_seed(3, "epoch", 4) == derive_seed(3, "epoch", 4)


_LENGTHS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=12).filter(any)


@given(_LENGTHS, st.integers(1, 5), st.integers(1, 7), st.integers(1, 20), st.integers(0, 2**32))
def test_every_epoch_of_windows_uses_every_sample_exactly_once(
    lengths: list[int], replicas: int, batch: int, mixed: int, seed: int
) -> None:
    samples = sum(lengths)
    order = SampleOrder(seed=seed, samples=samples, replicas=replicas, batch=batch, shards=lengths, mixed=mixed)
    steps = -(-3 * samples // (replicas * batch))
    stream = [s for step in range(steps) for replica in range(replicas) for s in order.samples(step, replica)]
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@settings(max_examples=15)
@given(_LENGTHS, st.integers(1, 6), st.integers(1, 5), st.randoms(use_true_random=False))
def test_windows_do_not_depend_on_what_was_asked_before(
    lengths: list[int], replicas: int, batch: int, random: object
) -> None:
    def fresh() -> SampleOrder:
        return SampleOrder(seed=5, samples=sum(lengths), replicas=replicas, batch=batch, shards=lengths, mixed=8)

    places = [(step, replica) for step in range(6) for replica in range(replicas)]
    expected = {place: fresh().samples(*place) for place in places}
    random.shuffle(places)  # type: ignore[attr-defined]
    order = fresh()
    assert {place: order.samples(*place) for place in places} == expected


@pytest.mark.parametrize("lengths", [[50] * 40, [20] * 10 + [900] + [30] * 20 + [500], [2000]])
def test_replicas_read_few_shards_at_a_time_and_most_shards_once(lengths: list[int]) -> None:
    """Four replicas and eight mixed shards: two at a time each. Only ends of a replica's range are read twice."""
    replicas, batch, samples = 4, 5, sum(lengths)
    order = SampleOrder(seed=1, samples=samples, replicas=replicas, batch=batch, shards=lengths, mixed=8)
    shard_of = [shard for shard, length in enumerate(lengths) for _ in range(length)]
    visits = 0
    for replica in range(replicas):
        streams = [[shard_of[s] for s in order.samples(step, replica)] for step in range(samples // replicas // batch)]
        for now, following in pairwise(streams):
            assert len({*now, *following}) <= 2 * 2, "two windows at most"
        read = [shard for stream in streams for shard in stream]
        visits += sum(True for _ in dict.fromkeys(read))
    assert visits <= len(lengths) + replicas


def test_windows_mix_shards_and_differ_between_epochs_and_seeds() -> None:
    def epoch(seed: int, number: int) -> tuple[int, ...]:
        order = SampleOrder(seed=seed, samples=100, replicas=2, batch=50, shards=[10] * 10, mixed=4)
        return tuple(s for replica in range(2) for s in order.samples(number, replica))

    assert len({epoch(seed, number) for seed in range(4) for number in range(4)}) == 16
    first = epoch(0, 0)
    assert {s // 10 for s in first[:20]} == {s // 10 for s in first[:9]}, "two shards, mixed"
    assert len({s // 10 for s in first[:20]}) == 2
    assert len({s // 10 for s in first[:50]}) == 5, "the other five are the second replica's"


# ---- Which items of a stream a replica reads ----


@pytest.mark.parametrize(("parts", "replicas"), [(1, 1), (1, 6), (2, 6), (3, 6), (6, 6), (12, 6), (5, 1), (8, 2)])
def test_every_item_is_read_once_and_each_part_from_its_beginning_on(parts: int, replicas: int) -> None:
    order, steps = StreamOrder(parts, replicas=replicas, batch=3), 2 * max(1, parts // replicas)
    read = [order.items(step, replica) for step in range(steps) for replica in range(replicas)]
    for part in range(parts):
        numbers = [n for items in read if items.part == part for n in range(items.first, items.stop)]
        assert numbers == list(range(steps * replicas * 3 // parts))


def test_neighbouring_replicas_share_a_part() -> None:
    order = StreamOrder(2, replicas=4, batch=8)
    assert [order.items(5, replica) for replica in range(4)] == [
        Items(0, 80, 88), Items(0, 88, 96), Items(1, 80, 88), Items(1, 88, 96)
    ]  # fmt: skip


def test_items_have_numbers_in_the_whole_stream() -> None:
    assert list(StreamOrder(2, replicas=2, batch=3).samples(1, 1)) == [7, 9, 11]


def test_parts_and_replicas_have_to_divide_each_other() -> None:
    with pytest.raises(ValueError, match="4 parts for 6 replicas"):
        StreamOrder(4, replicas=6, batch=1)


# ---- A stream's passes and the job's steps: whichever is over first ends the job ----


def test_nobody_looks_for_the_end_without_passes_nor_at_the_last_step() -> None:
    assert [orders.stream_looks_ahead(2, step, 4) for step in range(4)] == [True, True, True, False]
    assert not any(orders.stream_looks_ahead(0, step, 4) for step in range(4))


def test_what_is_said_at_the_beginning_names_both() -> None:
    assert stream_reads(3, 1000, given=True) == "the stream is read passes=3 times, for 1000 steps at most"
    assert stream_reads(3, 1000, given=False).endswith(" (steps= is not given)")
    assert stream_reads(0, 1000, given=True) == ""


def test_at_the_end_nothing_is_claimed_that_nobody_knows() -> None:
    """The stream may end with the last step too: nobody has looked."""
    assert stream_unread(3, 8).startswith("the job's 8 steps are over, and its stream, with passes=3, may not be")
    assert stream_unread(0, 8) == ""
