"""Which items of a stream a replica reads: each item of each part once, whatever the numbers."""

from __future__ import annotations

import pytest

from rallypoint.core.order import Items, StreamOrder


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
