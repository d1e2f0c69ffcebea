"""Learning-rate schedules: the numbers at the ends and in the middle."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.core.schedule import Schedule, constant, cosine, linear, rate_at, scaled, step_decay

PURE = settings(derandomize=True, deadline=None, max_examples=60)

_PEAKS = st.floats(1e-6, 10.0)
_SCHEDULES = st.one_of(
    st.builds(lambda peak, warmup: constant(peak, warmup=warmup), _PEAKS, st.integers(0, 20)),
    st.builds(lambda peak, warmup: cosine(peak, warmup=warmup, floor=peak / 10), _PEAKS, st.integers(0, 20)),
    st.builds(lambda peak, warmup: linear(peak, warmup=warmup, floor=peak / 10), _PEAKS, st.integers(0, 20)),
    st.builds(lambda peak, warmup, every: step_decay(peak, every=every, warmup=warmup), _PEAKS, st.integers(0, 20),
              st.integers(1, 30)),
)  # fmt: skip


@PURE
@given(_SCHEDULES, st.integers(1, 200))
def test_the_rate_is_never_negative_nor_above_the_peak(schedule: Schedule, steps: int) -> None:
    rates = [rate_at(schedule, step, steps) for step in range(steps + 1)]
    assert all(0 <= rate <= schedule.peak * (1 + 1e-12) for rate in rates)


@PURE
@given(_SCHEDULES, st.integers(21, 200))
def test_the_rate_rises_to_the_peak_during_warmup_and_never_rises_after(schedule: Schedule, steps: int) -> None:
    rates = [rate_at(schedule, step, steps) for step in range(steps + 1)]
    rise, rest = rates[: schedule.warmup], rates[schedule.warmup :]
    assert rise == pytest.approx([schedule.peak * (i + 1) / schedule.warmup for i in range(schedule.warmup)])
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(rest))


def test_constant_stays() -> None:
    assert [rate_at(constant(0.1), step, 100) for step in (0, 50, 99)] == [0.1, 0.1, 0.1]


def test_warmup_rises_in_a_line_to_the_peak() -> None:
    assert [rate_at(constant(1.0, warmup=4), step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_is_the_peak_at_first_the_mean_in_the_middle_and_the_floor_at_the_end() -> None:
    schedule = cosine(1.0, warmup=20, floor=0.2)
    assert rate_at(schedule, 20, 120) == 1.0
    assert rate_at(schedule, 70, 120) == pytest.approx(0.6)
    assert rate_at(schedule, 45, 120) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)))
    assert rate_at(schedule, 120, 120) == pytest.approx(0.2)
    assert rate_at(schedule, 500, 120) == pytest.approx(0.2)  # never below the floor, nor up again


def test_linear_is_the_peak_at_first_the_mean_in_the_middle_and_the_floor_at_the_end() -> None:
    schedule = linear(1.0, warmup=20, floor=0.2)
    assert rate_at(schedule, 20, 120) == 1.0
    assert rate_at(schedule, 70, 120) == pytest.approx(0.6)
    assert rate_at(schedule, 120, 120) == pytest.approx(0.2)
    assert rate_at(schedule, 500, 120) == pytest.approx(0.2)


def test_step_decay_multiplies_after_every_so_many_steps() -> None:
    schedule = step_decay(1.0, every=30, factor=0.5)
    assert [rate_at(schedule, step, 100) for step in (0, 29, 30, 59, 60, 99)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("make", [cosine, linear])
def test_a_job_that_ends_within_its_warmup_has_a_rate_at_every_step(make: object) -> None:
    schedule = make(1.0, warmup=10)  # type: ignore[operator]
    assert [rate_at(schedule, step, 10) for step in (0, 9)] == [0.1, 1.0]
    assert rate_at(schedule, 10, 10) == 1.0  # no division by zero
    assert rate_at(schedule, 3, 4) == pytest.approx(0.4)


@PURE
@given(_SCHEDULES)
def test_a_schedule_survives_the_wire(schedule: Schedule) -> None:
    assert msgspec.convert(msgspec.to_builtins(schedule), Schedule) == schedule


@PURE
@given(_SCHEDULES, st.integers(0, 50))
def test_a_scaled_schedule_has_the_rates_times_the_factor(schedule: Schedule, step: int) -> None:
    """The warm-up and the floor too."""
    assert rate_at(scaled(schedule, 4.0), step, 40) == pytest.approx(4.0 * rate_at(schedule, step, 40))
    assert scaled(schedule, 1.0) is schedule
