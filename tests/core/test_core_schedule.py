"""Learning-rate schedules: the numbers at the ends and in the middle."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.config import record_of, resolve
from rallypoint.config.changes import changed_record
from rallypoint.core import schedule as schedules
from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.optimizer import AdamW
from rallypoint.core.schedule import Schedule, constant, cosine, linear, rate_at, scaled_lr, step_decay, tabulated
from rallypoint.errors import ConfigError

_PEAKS = st.floats(1e-6, 10.0)
_SCHEDULES = st.one_of(
    st.builds(lambda peak, warmup: constant(peak, warmup=warmup), _PEAKS, st.integers(0, 20)),
    st.builds(lambda peak, warmup: cosine(peak, warmup=warmup, floor=peak / 10), _PEAKS, st.integers(0, 20)),
    st.builds(lambda peak, warmup: linear(peak, warmup=warmup, floor=peak / 10), _PEAKS, st.integers(0, 20)),
    st.builds(lambda peak, warmup, every: step_decay(peak, every=every, warmup=warmup), _PEAKS, st.integers(0, 20),
              st.integers(1, 30)),
)  # fmt: skip


@given(_SCHEDULES, st.integers(1, 200))
def test_the_rate_is_never_negative_nor_above_the_peak(schedule: Schedule, steps: int) -> None:
    rates = [rate_at(schedule, step, steps) for step in range(steps + 1)]
    assert all(0 <= rate <= schedule.peak * (1 + 1e-12) for rate in rates)


@given(_SCHEDULES, st.integers(21, 200))
def test_the_rate_rises_to_the_peak_during_warmup_and_never_rises_after(schedule: Schedule, steps: int) -> None:
    rates = [rate_at(schedule, step, steps) for step in range(steps + 1)]
    rise, rest = rates[: schedule.warmup], rates[schedule.warmup :]
    assert rise == pytest.approx([schedule.peak * (i + 1) / schedule.warmup for i in range(schedule.warmup)])
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(rest))


def test_warmup_rises_in_a_line_to_the_peak() -> None:
    assert [rate_at(constant(1.0, warmup=4), step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("schedule", "a_quarter"),
    [(cosine(1.0, warmup=20, floor=0.2), 0.6 + 0.4 * math.sqrt(0.5)), (linear(1.0, warmup=20, floor=0.2), 0.8)],
)
def test_it_is_the_peak_at_first_the_mean_in_the_middle_and_the_floor_at_the_end(
    schedule: Schedule, a_quarter: float
) -> None:
    assert rate_at(schedule, 20, 120) == 1.0
    assert rate_at(schedule, 70, 120) == pytest.approx(0.6)
    assert rate_at(schedule, 45, 120) == pytest.approx(a_quarter)
    assert rate_at(schedule, 120, 120) == pytest.approx(0.2)
    assert rate_at(schedule, 500, 120) == pytest.approx(0.2)  # never below the floor, nor up again


def test_step_decay_multiplies_after_every_so_many_steps() -> None:
    schedule = step_decay(1.0, every=30, factor=0.5)
    assert [rate_at(schedule, step, 100) for step in (0, 29, 30, 59, 60, 99)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("make", [cosine, linear])
def test_a_job_that_ends_within_its_warmup_has_a_rate_at_every_step(make: object) -> None:
    schedule = make(1.0, warmup=10)  # type: ignore[operator]
    assert [rate_at(schedule, step, 10) for step in (0, 9)] == [0.1, 1.0]
    assert rate_at(schedule, 10, 10) == 1.0  # no division by zero
    assert rate_at(schedule, 3, 4) == pytest.approx(0.4)


def _saw(step: int) -> float:
    return 0.5 if step % 7 < 3 else 0.01 * step


def _record(schedule: Schedule, **settings: object) -> JobRecord:
    config = resolve({"steps": 40, "optimizer": AdamW(lr=schedule), **settings})
    made = record_of(config, build_layout([TensorSpec("w", (40,), "float32", 0)], 64))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=JobRecord)


def test_a_tabulated_function_gives_its_own_values_and_its_last_one_after_them() -> None:
    table = tabulated(_saw, steps=30)
    assert [rate_at(table, step, 100) for step in range(30)] == [_saw(step) for step in range(30)]
    assert {rate_at(table, step, 100) for step in (30, 31, 99)} == {_saw(29)}


def test_equal_rates_one_after_another_are_written_once() -> None:
    assert tabulated(lambda step: 1.0 if step < 1_000 else 0.1, steps=5_000) == schedules.Table((0, 1_000), (1.0, 0.1))


def test_a_table_is_data_of_the_job_record() -> None:
    schedule = resolve(_record(tabulated(_saw, steps=30)).config).schedule
    assert [rate_at(schedule, step, 40) for step in range(30)] == [_saw(step) for step in range(30)]


def test_a_rate_follows_the_global_batch_by_one_rule_or_the_other() -> None:
    assert scaled_lr(0.1, 1024, base=256) == pytest.approx(0.4)
    assert scaled_lr(1e-3, 1024, base=256, rule="sqrt") == pytest.approx(2e-3)
    with pytest.raises(ConfigError, match="each is at least 1"):
        scaled_lr(0.1, 8, base=0)
    with pytest.raises(ConfigError, match='it is "linear" or "sqrt"'):
        scaled_lr(0.1, 8, base=4, rule="cube")  # type: ignore[arg-type]


def test_workers_whose_functions_differ_are_told_at_which_value() -> None:
    first, other = _record(tabulated(_saw, steps=30)), _record(tabulated(lambda s: _saw(s) + (s == 4), steps=30))
    assert disagreement(first, other) == "different settings: optimizer.lr.rates[2] is 1.04 here, 0.04 there"
    shorter = _record(tabulated(_saw, steps=20))
    assert disagreement(first, shorter) == "different settings: optimizer.lr.rates has 14 values here, 21 there"


def test_the_whole_schedule_may_change_when_a_job_goes_on() -> None:
    new = msgspec.to_builtins(tabulated(_saw, steps=40))
    record, changes = changed_record(_record(cosine(1e-3, warmup=4)), {"optimizer": {"lr": new}}, 10)
    (change,) = changes
    assert str(change).startswith("optimizer.lr is table(starts=28 values, 0 to 39, rates=28 values, 0.5 to 0.39)")
    assert rate_at(resolve(record.config).schedule, 12, 40) == _saw(12)


@pytest.mark.parametrize(
    ("rate_of", "steps", "sentence"),
    [
        (lambda step: -1.0, 3, "the rate of step 0 is -1.0: it must be finite, of at least 0"),
        (lambda step: math.inf if step == 2 else 1.0, 3, "the rate of step 2 is inf"),
        (lambda step: 1.0, 0, "at least one step, and steps is 0"),
        (lambda step: 1.0 + step, schedules.MOST_RATES + 1, "changes more than 65536 times by step 65536"),
    ],
)
def test_a_function_that_gives_no_rates_is_refused(rate_of: Callable[[int], float], steps: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tabulated(rate_of, steps=steps)


@pytest.mark.parametrize(
    ("starts", "rates", "sentence"),
    [
        ([], [], "0 starts and 0 rates"), ([0, 2], [1.0], "2 starts and 1 rates"), ([1], [1.0], "must rise from 0"),
        ([0, 3, 3], [1.0, 2.0, 3.0], "must rise from 0"), ([0], [-1.0], "finite, of at least 0"),
        ([0], [math.nan], "lr.rates is"),
    ],
)
def test_a_table_from_elsewhere_that_is_none_is_refused(starts: list[int], rates: list[float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve({"optimizer": {"type": "adamw", "lr": {"type": "table", "starts": starts, "rates": rates}}})
