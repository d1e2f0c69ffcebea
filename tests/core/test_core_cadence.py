"""Turns of shards: whatever the numbers, ticks and a shard's own versions agree, with each other and a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.cadence import EVERY_ROUND, TOGETHER, Cadence, Period, cut_evenly, cycle, first_empty


@st.composite
def turns(draw: st.DrawFn) -> Period:
    """One round of up to six."""
    every = draw(st.integers(1, 6))
    return Period(every, draw(st.integers(0, every - 1)))


TURNS = turns()


@st.composite
def cadences(draw: st.DrawFn) -> Cadence:
    """At least one shard of each turn, some more, and perhaps some that take none; no tick is empty."""
    fragments = draw(st.integers(1, 5))  # at least these see to that
    periods = [*(Period(fragments, f) for f in range(fragments)), *draw(st.lists(TURNS, max_size=3))]
    periods = draw(st.permutations(list(dict.fromkeys(periods))))
    more = draw(st.lists(st.sampled_from([EVERY_ROUND, *range(len(periods))]), max_size=4))
    of = (*draw(st.permutations(range(len(periods)))), *more)
    return Cadence(tuple(periods), draw(st.integers(1, 14)), of)


def rounds_of(cadence: Cadence, shard: int) -> list[int]:
    """When the shard is due, as the definition says it."""
    index, last = cadence.period_of[shard], cadence.rounds - 1
    period = Period(1, 0) if index == EVERY_ROUND else cadence.periods[index]
    theirs = range(period.first, cadence.rounds, period.every)
    return [round for round in range(cadence.rounds) if round in theirs or round == last]


@given(cadences())
def test_a_shard_is_due_in_its_rounds_and_everything_is_at_the_end(cadence: Cadence) -> None:
    for shard in range(len(cadence.period_of)):
        assert [t for t in range(cadence.rounds) if cadence.due(shard, t)] == rounds_of(cadence, shard)
    assert all(cadence.due(shard, cadence.rounds - 1) for shard in range(len(cadence.period_of)))


@given(cadences())
def test_a_shard_s_own_version_is_the_number_of_rounds_at_which_it_was_due(cadence: Cadence) -> None:
    for shard in range(len(cadence.period_of)):
        due = rounds_of(cadence, shard)
        for round in range(cadence.rounds + 1):
            assert cadence.updates_before(shard, round) == sum(t < round for t in due)
        assert cadence.updates(shard) == len(due)
        assert [cadence.round_of(shard, version) for version in range(len(due) + 1)] == [*due, cadence.rounds]


@given(cadences())
def test_a_version_is_right_from_the_round_after_its_update_to_the_next_one_that_is_due(cadence: Cadence) -> None:
    for shard in range(len(cadence.period_of)):
        for round in range(-1, cadence.rounds + 3):
            version = cadence.updates_before(shard, round)
            assert cadence.round_of(shard, version) == cadence.next_due(shard, round)
            assert cadence.begun(shard, version) <= round <= cadence.round_of(shard, version)
        for round in range(cadence.rounds + 2):
            changed = cadence.updates_before(shard, round) != cadence.updates_before(shard, round + 1)
            assert cadence.changes(shard, round, round + 1) == changed
            assert changed == (cadence.due(shard, round) or round >= cadence.rounds)


@given(cadences())
def test_every_round_has_one_witness_and_it_is_due(cadence: Cadence) -> None:
    for round in range(cadence.rounds):
        witness = cadence.witness(round)
        assert cadence.due(witness, round)
        assert cadence.period_of[witness] != EVERY_ROUND, "to which replica 0 alone contributes"


@given(cadences(), st.integers(-3, 30))
def test_a_round_before_the_first_or_after_the_last_has_a_witness_too(cadence: Cadence, round: int) -> None:
    assert 0 <= cadence.witness(round) < len(cadence.period_of)


@given(st.lists(TURNS, min_size=1, max_size=4))
def test_the_first_round_that_nothing_is_due_at_is_found_within_a_cycle(periods: list[Period]) -> None:
    due = {round for period in periods for round in range(period.first, 2 * cycle(periods), period.every)}
    empty = [round for round in range(2 * cycle(periods)) if round not in due]
    assert first_empty(periods) == (empty[0] if empty else None)
    assert all((round + cycle(periods) in due) == (round in due) for round in range(cycle(periods)))


@given(st.integers(-1, 50), st.integers(0, 9), st.integers(0, 40))
def test_without_staggering_rounds_and_versions_are_the_same_numbers(round: int, shard: int, rounds: int) -> None:
    for cadence in (Cadence(), Cadence((), rounds), TOGETHER):
        assert cadence.due(shard, round)
        assert cadence.updates_before(shard, round) == cadence.next_due(shard, round) == round
        assert cadence.round_of(shard, round) == cadence.begun(shard, round) == round
        assert cadence.changes(shard, round, round + 1)
        assert cadence.witness(round) == 0


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 6))
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
