"""Copies on their way to the store: nobody else's memory, and given back, used again."""

from __future__ import annotations

import numpy as np
import pytest

from rallypoint.store import writer
from rallypoint.store.record import ShardRecord
from rallypoint.store.writer import StagedCopies


def record(words: int = 4, value: float = 0.0) -> ShardRecord:
    arrays = {"master": np.full(words, value, np.float32), "ids": np.arange(words)}
    return ShardRecord(3, 1, arrays, {"step": 1.0}, (5,))


def address(record: ShardRecord) -> int:
    return int(record.arrays["master"].ctypes.data)


def test_a_copy_does_not_change_with_what_it_was_copied_from() -> None:
    original = record()
    copy = StagedCopies().copy(original)
    original.arrays["master"] += 1
    original.scalars["step"] = 2.0
    assert copy.arrays["master"].tolist() == [0.0] * 4
    assert copy.arrays["ids"].tolist() == [0, 1, 2, 3]
    assert (copy.shard, copy.version, copy.scalars, copy.clocks) == (3, 1, {"step": 1.0}, (5,))


def test_what_is_given_back_is_used_for_the_next_copy_of_that_size_and_only_then() -> None:
    lent = StagedCopies()
    first, second = lent.copy(record(value=1.0)), lent.copy(record(value=2.0))
    assert address(first) != address(second)
    at = address(first)
    lent.give_back(first)
    lent.give_back(first)  # twice: it is not lent to two
    other_size, third, fourth = lent.copy(record(5)), lent.copy(record(value=3.0)), lent.copy(record(value=4.0))
    assert at not in (address(other_size), address(fourth))
    assert address(third) == at
    assert [float(copy.arrays["master"][0]) for copy in (second, third, fourth)] == [2.0, 3.0, 4.0]


def test_a_record_that_is_no_copy_from_here_is_left_alone() -> None:
    lent, own = StagedCopies(), record()
    lent.give_back(own)
    assert address(lent.copy(record())) != address(own)


def test_more_than_a_certain_amount_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "KEPT_BYTES", 4 * 4 + 4 * 8 + 1)
    lent = StagedCopies()
    copies = [lent.copy(record()) for _ in range(3)]
    for copy in copies:
        lent.give_back(copy)
    assert {name for name, _ in lent._free} == {"float32", "int64"}
    assert sum(array.nbytes for free in lent._free.values() for array in free) == lent._kept <= writer.KEPT_BYTES
