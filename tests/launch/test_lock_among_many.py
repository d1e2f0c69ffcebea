"""A coordinator of many members lets its threads wait longer before they ask for Python's lock; one of few does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rallypoint.core.cluster.terms import Terms
from rallypoint.launch.commands.by_hand import share_lock_among_many


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    """Python's own interval; it is set back afterwards."""
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_a_coordinator_of_few_members_keeps_pythons_interval(interval: float) -> None:
    share_lock_among_many(Terms(workers_start=90, workers_max=90, servers=9))
    assert sys.getswitchinterval() == interval


def test_threads_of_a_coordinator_of_many_members_ask_less_often(interval: float) -> None:
    share_lock_among_many(Terms(workers_start=90, workers_max=90, servers=10))
    assert sys.getswitchinterval() == pytest.approx(0.1)
