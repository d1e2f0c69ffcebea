"""Values by step in bounded memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.watch.state import Series


def test_few_values_are_kept_as_they_are() -> None:
    series = Series()
    for step in range(5):
        series.add(step, step / 2)
    assert series.columns() == {
        "step": [0, 1, 2, 3, 4], "mean": [0.0, 0.5, 1.0, 1.5, 2.0], "low": [0.0, 0.5, 1.0, 1.5, 2.0],
        "high": [0.0, 0.5, 1.0, 1.5, 2.0],
    }  # fmt: skip


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=200), st.integers(2, 16))
def test_no_value_is_lost_however_few_points_there_are(values: list[float], most: int) -> None:
    series = Series(most=most)
    for step, value in enumerate(values):
        series.add(step, value)
    assert len(series.points) <= most
    assert sum(point.count for point in series.points) == len(values)
    assert [p.step for p in series.points] == list(range(0, len(values), series.width))
    for point in series.points:
        own = values[point.step : point.step + series.width]
        assert (point.low, point.high) == (min(own), max(own))
        assert math.isclose(point.total, math.fsum(own), rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.slow
def test_a_million_steps_are_two_thousand_points() -> None:
    series = Series()
    for step in range(1_000_000):
        series.add(step, 1.0)
    assert 1024 <= len(series.points) <= 2048
    assert series.width == 512


def test_a_run_that_went_back_shows_what_it_computes_anew() -> None:
    series = Series()
    for step in range(10):
        series.add(step, 1.0)
    seen = series.revision
    for step in range(4, 7):
        series.add(step, 2.0)
    assert series.columns()["mean"] == [1.0] * 4 + [2.0] * 3
    assert series.whole > seen


def test_values_that_are_no_numbers_are_left_out() -> None:
    series = Series()
    for step, value in enumerate([1.0, math.nan, math.inf, 2.0]):
        series.add(step, value)
    assert series.columns()["step"] == [0, 3]


def test_only_what_is_new_can_be_asked_for() -> None:
    series = Series()
    for step in range(10):
        series.add(step, 1.0)
    end = series.end
    series.add(10, 3.0)
    assert series.columns(end)["step"] == [9, 10]
    assert series.whole == 0
