"""Questions about all shards: the same answers as looking at every one, with far fewer looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.worker.slots import Lowest, Unanimity


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 4)), max_size=40))
def test_lowest_is_the_lowest_of_numbers_that_only_rise(size: int, changes: list[tuple[int, int]]) -> None:
    numbers, plain = Lowest(size, -1), [-1] * size
    for index, number in changes:
        numbers.raise_to(index % size, number)
        plain[index % size] = max(plain[index % size], number)
        assert [numbers[i] for i in range(size)] == plain
        assert numbers.lowest == min(plain)


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_unanimity_whatever_changes_between_two_questions(size: int, changes: list[tuple[int, bool]]) -> None:
    here, every = [False] * size, Unanimity(size)
    for index, value in changes:
        here[index % size] = value
        assert every.holds(lambda i: here[i]) == all(here)


def test_waiting_for_n_takes_few_looks_in_whatever_order_they_come() -> None:
    for order in (range(1000), reversed(range(1000)), [i * 7 % 1000 for i in range(1000)]):
        here, looks, every = [False] * 1000, 0, Unanimity(1000)

        def look(index: int, here: list[bool] = here) -> bool:
            nonlocal looks
            looks += 1
            return here[index]

        for index in order:
            here[index] = True
            done = every.holds(look)
        assert done
        assert looks <= 3000
