"""Turns of shards: whatever the numbers, ticks and a shard's own versions agree, with each other and a plain list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.core.cadence import EVERY_TICK, Cadence, cut_evenly

PURE = settings(derandomize=True, deadline=None, max_examples=120)


@st.composite
def cadences(draw: st.DrawFn) -> Cadence:
    """At least one shard of each fragment, some more, and perhaps some that take no turns."""
    fragments = draw(st.integers(2, 5))
    more = draw(st.lists(st.sampled_from([EVERY_TICK, *range(fragments)]), max_size=4))
    return Cadence(fragments, draw(st.integers(1, 14)), (*range(fragments), *more))


def ticks_of(cadence: Cadence, shard: int) -> list[int]:
    """When the shard is due, as the definition says it."""
    fragment, last = cadence.fragment_of[shard], cadence.ticks - 1
    return [t for t in range(cadence.ticks) if fragment in (EVERY_TICK, t % cadence.fragments) or t == last]


@given(cadences())
@PURE
def test_a_fragment_is_due_in_turn_and_everything_is_at_the_end(cadence: Cadence) -> None:
    for shard in range(len(cadence.fragment_of)):
        assert [t for t in range(cadence.ticks) if cadence.due(shard, t)] == ticks_of(cadence, shard)
    assert all(cadence.due(shard, cadence.ticks - 1) for shard in range(len(cadence.fragment_of)))


@given(cadences())
@PURE
def test_a_shard_s_own_version_is_the_number_of_ticks_at_which_it_was_due(cadence: Cadence) -> None:
    for shard in range(len(cadence.fragment_of)):
        due = ticks_of(cadence, shard)
        for tick in range(cadence.ticks + 1):
            assert cadence.updates_before(shard, tick) == sum(t < tick for t in due)
        assert cadence.updates(shard) == len(due)
        assert [cadence.tick_of(shard, version) for version in range(len(due) + 1)] == [*due, cadence.ticks]


@given(cadences())
@PURE
def test_a_version_is_right_from_the_tick_after_its_update_to_the_next_one_that_is_due(cadence: Cadence) -> None:
    for shard in range(len(cadence.fragment_of)):
        for tick in range(-1, cadence.ticks + 3):
            version = cadence.updates_before(shard, tick)
            assert cadence.tick_of(shard, version) == cadence.next_due(shard, tick)
            assert cadence.begun(shard, version) <= tick <= cadence.tick_of(shard, version)
        for tick in range(cadence.ticks + 2):
            changed = cadence.updates_before(shard, tick) != cadence.updates_before(shard, tick + 1)
            assert cadence.changes(shard, tick, tick + 1) == changed
            assert changed == (cadence.due(shard, tick) or tick >= cadence.ticks)


@given(cadences())
@PURE
def test_every_tick_has_one_witness_and_it_is_due(cadence: Cadence) -> None:
    for tick in range(cadence.ticks):
        assert cadence.due(cadence.witness(tick), tick)


@given(st.integers(-1, 50), st.integers(0, 9), st.integers(0, 40))
@PURE
def test_with_one_fragment_ticks_and_versions_are_the_same_numbers(tick: int, shard: int, ticks: int) -> None:
    for cadence in (Cadence(), Cadence(1, ticks)):
        assert cadence.due(shard, tick)
        assert cadence.updates_before(shard, tick) == cadence.next_due(shard, tick) == tick
        assert cadence.tick_of(shard, tick) == cadence.begun(shard, tick) == tick
        assert cadence.changes(shard, tick, tick + 1)
        assert cadence.witness(tick) == 0


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 6))
@PURE
def test_a_row_is_cut_into_runs_none_of_which_is_empty(sizes: list[int], parts: int) -> None:
    parts = min(parts, len(sizes))
    cut = cut_evenly(sizes, parts)
    assert cut == sorted(cut)
    assert set(cut) == set(range(parts))


def test_runs_have_about_equal_size() -> None:
    assert cut_evenly([1] * 12, 3) == [0] * 4 + [1] * 4 + [2] * 4
    assert cut_evenly([100, 1, 1], 3) == [0, 1, 2]
    sizes = [7, 3, 9, 4, 4, 8, 2, 6, 5, 1] * 4
    runs = [sum(s for s, part in zip(sizes, cut_evenly(sizes, 4), strict=True) if part == p) for p in range(4)]
    assert max(runs) - min(runs) <= 2 * max(sizes)
