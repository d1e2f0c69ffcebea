"""The order in which passes use parameters, and what is asked for ahead."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.worker.sources.streamed import UseOrder

BYTES = [10, 20, 30, 40]


def run(order: UseOrder, uses: Sequence[int]) -> None:
    order.begin()
    for index in uses:
        order.use(index)
    order.end()


def test_nothing_is_known_in_the_first_pass() -> None:
    order = UseOrder(BYTES)
    order.begin()
    order.use(0)
    assert order.ahead(100) == []


def test_the_next_ones_are_asked_for_each_once_up_to_so_many_bytes() -> None:
    order = UseOrder(BYTES)
    run(order, [0, 1, 2, 3, 3, 2, 1, 0])
    order.begin()
    assert order.ahead(60) == [0, 1, 2]
    order.use(0)
    order.use(1)
    assert order.ahead(70) == [2, 3]
    order.use(2)
    assert order.ahead(70) == [3, 2], "the same one, forward and backward, is asked for once"
    assert order.ahead(1) == [3], "the first in any case"


def test_a_pass_in_another_order_finds_its_place_and_is_learnt() -> None:
    order = UseOrder(BYTES)
    run(order, [0, 1, 2, 3])
    order.begin()
    order.use(2)  # 0 and 1 are left out
    assert order.ahead(1000) == [3]
    order.use(0)  # it was used before: the place stays
    assert order.ahead(1000) == [3]
    order.end()
    order.begin()
    assert order.ahead(1000) == [2, 0]


def test_a_pass_that_uses_nothing_changes_nothing() -> None:
    order = UseOrder(BYTES)
    run(order, [1, 2])
    run(order, [])
    order.begin()
    assert order.ahead(1000) == [1, 2]
