"""The road of a gradient has a budget (I13): what it has today, and no more. Who shortens it lowers the budget."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # its modules import one another by name

from hot_path import embedded, measure

pytestmark = pytest.mark.slow  # `make check` plays it
CALLS, FILES = 320, 34  # measured: 306 to 316 calls of our own functions through 33 files; the goal: 350 and 30


def test_a_shard_and_step_take_no_more_calls_and_files_than_the_budget() -> None:
    road = measure(embedded, repeats=0)
    assert road.own_calls <= CALLS, sorted(road.files.items(), key=lambda item: -item[1])
    assert len(road.files) <= FILES, sorted(road.files)
